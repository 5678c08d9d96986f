// Token inspection by pointer and keyboard, scrolling, focus, and Escape. Untrusted text is only
// ever inserted with textContent.
(() => {
  "use strict";
  const tokenOf = (event) =>
    event.target instanceof Element ? event.target.closest(".fsd-token[tabindex]") : null;

  const inspect = (event) => {
    const token = tokenOf(event);
    const inspector = document.getElementById("fsd-inspector");
    if (token && inspector) inspector.textContent = token.title;
  };
  document.addEventListener("focusin", inspect);
  document.addEventListener("mouseover", inspect);

  // Roving tabindex: an answer is one stop of the Tab key, arrow keys move between its tokens.
  const nextToken = (token, key) => {
    const tokens = [...token.closest(".fsd-answer").querySelectorAll(".fsd-token[tabindex]")];
    const index = tokens.indexOf(token);
    const last = tokens.length - 1;
    const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: last }[key];
    return next === undefined ? null : tokens[Math.min(Math.max(next, 0), last)];
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      document.getElementById("fsd-stop")?.click();
      return;
    }
    const token = tokenOf(event);
    const next = token && nextToken(token, event.key);
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  // Scroll requested content into view once it is rendered, and focus the message box after the
  // buttons that are followed by typing.
  const box = () => document.querySelector("#fsd-box textarea");
  const requested = { chat: false, comparison: false };
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("button") : null;
    if (!button) return;
    if (button.id === "fsd-send") requested.chat = true;
    if (button.id === "fsd-compare-button") {
      requested.comparison = true;
      // An identical comparison is not rendered again.
      const comparison = document.querySelector("#fsd-comparison-box .fsd-comparison");
      comparison?.scrollIntoView({ block: "nearest" });
    }
    if (button.matches("#fsd-send, #fsd-clear, #fsd-examples button")) box()?.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && event.target === box()) requested.chat = true;
  });
  const adds = (changes, selector) =>
    changes.some((change) =>
      [...change.addedNodes].some((node) => node instanceof Element && node.matches(selector)),
    );

  // The back/forward cache keeps a page's open connections, and browsers allow six per server:
  // close them when the page is left, and reload it when it is restored.
  window.addEventListener("pagehide", () => window.stop());
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });

  const initialize = () => {
    const chat = document.getElementById("fsd-chat");
    const comparison = document.getElementById("fsd-comparison-box");
    if (!chat || !comparison || !box() || chat.dataset.initialized) return;
    chat.dataset.initialized = "true";
    // Gradio's own autofocus would take the focus again whenever the box changes.
    box()?.focus();
    const options = { childList: true, subtree: true, characterData: true };
    // Keep the end of the chat in view unless the user has scrolled up.
    let height = 0;
    new MutationObserver((changes) => {
      let scroll = height - chat.scrollTop - chat.clientHeight < 40;
      if (requested.chat && adds(changes, ".fsd-message, .fsd-error")) {
        requested.chat = false;
        scroll = true;
      }
      if (scroll) chat.scrollTop = chat.scrollHeight;
      height = chat.scrollHeight;
    }).observe(chat, options);
    new MutationObserver((changes) => {
      if (!requested.comparison || !adds(changes, ".fsd-comparison, .fsd-error")) return;
      requested.comparison = false;
      comparison.scrollIntoView({ block: "nearest" });
    }).observe(comparison, options);
  };
  new MutationObserver(initialize).observe(document.documentElement, {
    childList: true,
    subtree: true,
  });
})();
