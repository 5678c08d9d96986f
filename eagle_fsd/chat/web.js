// Tokens for the keyboard and the pointer, the chat's scrolling, and Escape. Nothing here makes
// markup: what is told of a token goes in as text.
(() => {
  "use strict";
  const tokenOf = (event) =>
    event.target instanceof Element ? event.target.closest(".fsd-token[tabindex]") : null;

  const tell = (event) => {
    const token = tokenOf(event);
    const inspector = document.getElementById("fsd-inspector");
    if (token && inspector) inspector.textContent = token.title;
  };
  document.addEventListener("focusin", tell);
  document.addEventListener("mouseover", tell);

  // One stop of the Tab key an answer; the arrows lead from token to token.
  const step = (token, key) => {
    const tokens = [...token.closest(".fsd-answer").querySelectorAll(".fsd-token[tabindex]")];
    const place = tokens.indexOf(token);
    const last = tokens.length - 1;
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: last }[key];
    return next === undefined ? null : tokens[Math.min(Math.max(next, 0), last)];
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      document.getElementById("fsd-stop")?.click();
      return;
    }
    const token = tokenOf(event);
    const next = token && step(token, event.key);
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  // A browser may keep a page that is left, with its open connections; it has six for a server,
  // and the next page would wait for one. So they end here, and who comes back begins anew.
  window.addEventListener("pagehide", () => window.stop());
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });

  // The chat follows its end while its end is in view.
  let atEnd = true;
  const follow = () => {
    const chat = document.getElementById("fsd-chat");
    if (!chat || chat.dataset.followed) return;
    chat.dataset.followed = "yes";
    // Once: gradio's own autofocus comes back whenever the box changes, and takes the focus away
    // from whoever is setting a number meanwhile.
    document.querySelector("#fsd-box textarea")?.focus();
    chat.addEventListener("scroll", () => {
      atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 40;
    });
    const inside = { childList: true, subtree: true, characterData: true };
    new MutationObserver(() => {
      if (atEnd) chat.scrollTop = chat.scrollHeight;
    }).observe(chat, inside);
    // A comparison comes into view when it begins.
    const compared = document.getElementById("fsd-compared");
    let shown = false;
    new MutationObserver(() => {
      const begun = compared.querySelector(".fsd-compare") !== null;
      if (begun && !shown) compared.scrollIntoView({ block: "nearest" });
      shown = begun;
    }).observe(compared, inside);
  };
  new MutationObserver(follow).observe(document.documentElement, {
    childList: true,
    subtree: true,
  });
})();
