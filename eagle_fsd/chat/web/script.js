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

  // What a person has asked for is brought into view when it is drawn; and after some buttons comes
  // what is to be typed, or Enter.
  const box = () => document.querySelector("#fsd-box textarea");
  const asked = { chat: false, comparison: false };
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("button") : null;
    if (!button) return;
    if (button.id === "fsd-send") asked.chat = true;
    if (button.id === "fsd-compare-button") {
      asked.comparison = true;
      // One that turns out the same is not drawn anew.
      document.querySelector("#fsd-compared .fsd-compare")?.scrollIntoView({ block: "nearest" });
    }
    if (button.matches("#fsd-send, #fsd-clear, #fsd-examples button")) box()?.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && event.target === box()) asked.chat = true;
  });
  const draws = (changes, what) =>
    changes.some((change) =>
      [...change.addedNodes].some((node) => node instanceof Element && node.matches(what)),
    );

  // A browser may keep a page that is left, with its open connections; it has six for a server,
  // and the next page would wait for one. So they end here, and who comes back begins anew.
  window.addEventListener("pagehide", () => window.stop());
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });

  const follow = () => {
    const chat = document.getElementById("fsd-chat");
    if (!chat || !box() || chat.dataset.followed) return;
    chat.dataset.followed = "yes";
    // Once: gradio's own autofocus comes back whenever the box changes, and takes the focus away
    // from whoever is setting a number meanwhile.
    box()?.focus();
    const inside = { childList: true, subtree: true, characterData: true };
    // The chat follows its end while its end is in view.
    let height = 0;
    new MutationObserver((changes) => {
      let toEnd = height - chat.scrollTop - chat.clientHeight < 40;
      if (asked.chat && draws(changes, ".fsd-turn, .fsd-notice")) {
        asked.chat = false;
        toEnd = true;
      }
      if (toEnd) chat.scrollTop = chat.scrollHeight;
      height = chat.scrollHeight;
    }).observe(chat, inside);
    const compared = document.getElementById("fsd-compared");
    new MutationObserver((changes) => {
      if (!asked.comparison || !draws(changes, ".fsd-compare, .fsd-notice")) return;
      asked.comparison = false;
      compared.scrollIntoView({ block: "nearest" });
    }).observe(compared, inside);
  };
  new MutationObserver(follow).observe(document.documentElement, {
    childList: true,
    subtree: true,
  });
})();
