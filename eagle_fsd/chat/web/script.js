// Token inspection by pointer and keyboard, scrolling, focus, and Escape. Untrusted text is only
// ever inserted with textContent.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);
  const closest = (event, selector) =>
    event.target instanceof Element ? event.target.closest(selector) : null;
  const TOKEN = ".fsd-token[tabindex]";

  const describe = (text) => {
    const inspector = find("#fsd-inspector");
    if (inspector) inspector.textContent = text;
  };
  const inspect = (event) => {
    const bar = closest(event, ".fsd-bar");
    const token = bar
      ? document.querySelectorAll(`#fsd-live ${TOKEN}`)[[...bar.parentElement.children].indexOf(bar)]
      : closest(event, TOKEN);
    if (token) describe(token.title);
  };
  // On a narrow page the inspector is above the chat: a tap elsewhere closes it.
  document.addEventListener("click", (event) => {
    if (!closest(event, `${TOKEN}, .fsd-bar, #fsd-inspector`)) describe("");
  });
  document.addEventListener("focusin", inspect);
  document.addEventListener("mouseover", inspect);

  // Roving tabindex: an answer is one stop of the Tab key, arrow keys move between its tokens.
  const middle = (token) => {
    const [box] = token.getClientRects();
    return { x: box.left + box.width / 2, y: box.top + box.height / 2, height: box.height };
  };
  // The nearest token of the next line (sign 1) or the previous one (sign -1).
  const verticalNeighbor = (tokens, token, sign) => {
    const from = middle(token);
    const rest = tokens
      .map((item) => ({ item, at: middle(item) }))
      .filter(({ at }) => sign * (at.y - from.y) > from.height / 2);
    if (!rest.length) return token;
    const line = Math.min(...rest.map(({ at }) => sign * at.y));
    return rest
      .filter(({ at }) => sign * at.y < line + from.height / 2)
      .reduce((one, other) =>
        Math.abs(other.at.x - from.x) < Math.abs(one.at.x - from.x) ? other : one,
      ).item;
  };
  const nextToken = (token, key) => {
    const tokens = [...token.closest(".fsd-answer").querySelectorAll(TOKEN)];
    const index = tokens.indexOf(token);
    switch (key) {
      case "ArrowRight": return tokens[index + 1] ?? token;
      case "ArrowLeft": return tokens[index - 1] ?? token;
      case "ArrowDown": return verticalNeighbor(tokens, token, 1);
      case "ArrowUp": return verticalNeighbor(tokens, token, -1);
      case "Home": return tokens[0];
      case "End": return tokens.at(-1);
      default: return null;
    }
  };
  document.addEventListener("keydown", (event) => {
    const token = closest(event, TOKEN);
    if (event.key === "Escape") {
      // While a token is inspected, Escape closes the inspector only.
      if (!token || !find("#fsd-inspector").textContent) find("#fsd-stop")?.click();
      describe("");
      return;
    }
    const next = token && nextToken(token, event.key);
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  // The strip's line follows the slider. A token flips if the slider's T no longer admits it, or
  // admits a drafted token in its place where the answer's T did not.
  const showThreshold = () => {
    const strip = find("#fsd-live .fsd-strip");
    if (!strip) return;
    const threshold = Number(find("#fsd-threshold input").value);
    const decoded = Number(strip.dataset.threshold);
    const divergence = strip.dataset.divergence;
    const comparable = find("#fsd-divergence input").value === divergence;
    const flips = ({ style, classList }) => {
      const value = parseFloat(style.getPropertyValue("--d"));
      if (classList.contains("fsd-fuzzy")) return value >= threshold;
      return decoded <= value && value < threshold;
    };
    const texts = [];
    for (const item of document.querySelectorAll(`#fsd-live ${TOKEN}, #fsd-live .fsd-bar`)) {
      const flipped = comparable && flips(item);
      item.classList.toggle("fsd-flip", flipped);
      if (flipped && item.matches(TOKEN)) texts.push(`“${item.textContent}”`);
    }
    strip.style.setProperty("--fsd-t", comparable ? threshold : decoded);
    const count = texts.length === 1 ? "1 token would flip:" : `${texts.length} tokens would flip:`;
    const shown = texts.slice(0, 12).join(" ") + (texts.length > 12 ? " …" : "");
    const message = !comparable
      ? `The strip shows ${divergence}, not the divergence that is selected now.`
      : `At T = ${threshold}, ${texts.length ? `${count} ${shown}` : "no token would flip."}`;
    const status = strip.querySelector(".fsd-flips");
    if (status.textContent !== message) status.textContent = message;
  };
  // Gradio updates its inputs after the event.
  const showThresholdSoon = () => requestAnimationFrame(showThreshold);
  for (const type of ["input", "change", "click", "focusout"]) {
    document.addEventListener(type, (event) => {
      if (closest(event, "#fsd-side")) showThresholdSoon();
    });
  }

  // Scroll to the end of the chat when the user asks for something, and focus the message box after
  // the buttons that are followed by typing.
  const box = () => find("#fsd-box textarea");
  let requested = false;
  const request = () => {
    requested = true;
    find("#fsd-chat").scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("click", (event) => {
    const button = closest(event, "button");
    if (!button) return;
    if (button.matches("#fsd-send, #fsd-compare-button")) request();
    // An identical comparison is not rendered again.
    if (button.matches("#fsd-compare-button")) find("#fsd-chat").scrollTop = 1e9;
    if (button.matches("#fsd-clear, #fsd-compare-button")) describe("");
    if (button.matches("#fsd-send, #fsd-stop, #fsd-clear, #fsd-examples button")) box()?.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && event.target === box()) request();
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
    const chat = find("#fsd-chat");
    if (!chat || !box() || chat.dataset.initialized) return;
    chat.dataset.initialized = "true";
    // Gradio's own autofocus would take the focus again whenever the box changes.
    box()?.focus();
    // Keep the end of the chat in view unless the user has scrolled up.
    let height = 0;
    new MutationObserver((changes) => {
      showThreshold();
      let scroll = height - chat.scrollTop - chat.clientHeight < 40;
      if (requested && adds(changes, ".fsd-message, .fsd-error, .fsd-comparison")) {
        requested = false;
        scroll = true;
      }
      if (scroll) chat.scrollTop = chat.scrollHeight;
      height = chat.scrollHeight;
    }).observe(chat, { childList: true, subtree: true, characterData: true });
  };
  new MutationObserver(initialize).observe(document.documentElement, {
    childList: true,
    subtree: true,
  });
})();
