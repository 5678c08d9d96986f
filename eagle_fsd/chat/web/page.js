// The chat is kept here and decoded through the API. Text is only ever inserted as text nodes.
const LEGEND = {
  exact: "drafted, and the target's own choice",
  fuzzy: "accepted, but not the target's own choice",
  target: "the target's own choice after the accepted tokens",
};
const STATUSES = { length: "Reached max new tokens", stopped: "Stopped", failed: "Failed" };
const DIVERGENCES = { js: "Jensen-Shannon", kl: "Kullback-Leibler", tv: "total variation" };
const NONE = "—", PENDING = "…";
// Questions and answers that a request has; older ones are left out.
const MAX_EXCHANGES = 40;
const ALTERNATIVES = 3;
const BASELINE_TOKENS = 64;
// Milliseconds in which a browser on the server's machine renders the answer first.
const BASELINE_DELAY = 500;
// Decades that page.css shows of the divergence.
const SCALE_DECADES = 4;
// For a server that allows no threshold above 0.
const DEFAULT_MAX_DIVERGENCE = 0.5;
const KEY = "eagle-fsd-key";
const TOKEN = ".fsd-token[tabindex]:not([hidden])";

const find = (selector) => document.querySelector(selector);
const [chat, log, live, comparison] =
  ["chat", "log", "live", "comparison-box"].map((name) => find(`#fsd-${name}`));
const [box, stop, inspector] = ["#fsd-box textarea", "#fsd-stop", "#fsd-inspector"].map(find);
const controls = {};
let settings = null;
let exchanges = []; // {question, answer}
let newest = null; // the answer with the strip
let work = null; // the AbortController of an answer, a comparison or a baseline
let busy = false; // whether work is more than a baseline

const make = (tag, properties, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "<end>";
// A part of a character, or the end, has no text, but the token has.
const shownText = ({ text, piece }) => text || piece || "";
const quoted = (text) => `“${visible(text)}”`;
// A divergence's short name, and what it stands for: "top_k_js, Jensen-Shannon".
const spelled = (divergence) => {
  const name = divergence.split("_").find((part) => part in DIVERGENCES);
  return name ? `${divergence}, ${DIVERGENCES[name]}` : divergence;
};
// The end of the scale of divergences.
const maxDivergence = () =>
  settings.controls.find((control) => control.name === "threshold").max || DEFAULT_MAX_DIVERGENCE;
const percent = (fraction) => (fraction < 0.9995 ? `${(100 * fraction).toFixed(1)}%` : "100%");
const fuzzyShare = (usage) =>
  usage.completion_tokens ? percent(usage.fuzzy_tokens / usage.completion_tokens) : NONE;
const message = (author, ...children) =>
  make("div", { className: "fsd-message" },
    make("div", { className: "fsd-author" }, author), ...children);
const questionMessage = (text) =>
  message("You", make("div", { className: "fsd-question" }, text));
const showError = (parent, text) => {
  parent.querySelector(".fsd-error")?.remove();
  parent.append(make("div", { className: "fsd-error", role: "alert" }, text));
  scrollToEnd();
};

// Keep the end of the chat in view unless the user has scrolled up.
const scrollToEnd = () => {
  chat.scrollTop = chat.scrollHeight;
};
const follow = (change) => {
  const atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 40;
  change();
  if (atEnd) scrollToEnd();
};

// Requests. A key is kept until the tab is closed.
const askForKey = () => {
  find("#fsd-key-reason").textContent = sessionStorage.getItem(KEY)
    ? "The key is not valid."
    : "This server requires a key.";
  find("#fsd-key").hidden = false;
  find("#fsd-key input").focus();
};
const request = async (path, options = {}) => {
  const key = sessionStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json" };
  // Browsers reject some other characters; without the header, the server asks for a key.
  if (key && /^[\x20-\x7e]+$/.test(key)) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error?.message ?? `status ${response.status}`);
};
// Yields lists of chunks.
async function* stream(body, signal) {
  const options = { method: "POST", body: JSON.stringify(body), signal };
  const response = await request("v1/chat/completions", options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    const chunks = lines
      .filter((line) => line.startsWith("data: {"))
      .map((line) => JSON.parse(line.slice("data: ".length)));
    yield chunks.filter((chunk) => !chunk.error);
    const failed = chunks.find((chunk) => chunk.error);
    if (failed) throw new Error(failed.error.message);
  }
}

// What is accepted: by the controls, or losslessly.
const chosenAcceptance = () => {
  if (settings.rule !== "fsd") {
    const { label } = settings;
    const name = label[0].toUpperCase() + label.slice(1);
    return { params: {}, divergence: controls.divergence(), label, name };
  }
  const fsd = {};
  for (const { name, acceptance } of settings.controls) if (acceptance) fsd[name] = controls[name]();
  const { threshold, divergence } = fsd;
  const name = `FSD (T = ${threshold}, ${divergence})`;
  return { params: { fsd }, threshold, divergence, label: `T = ${threshold}`, name };
};
const exactAcceptance = () => ({
  params: { fsd: { threshold: 0, divergence: controls.divergence() } },
  threshold: 0,
  divergence: controls.divergence(),
  label: "T = 0",
  name: "Exact (T = 0)",
});

const bytes = (value) => new TextEncoder().encode(JSON.stringify(value)).length;

// The latest exchanges that a request has room for; the server drops those beyond the context.
const recent = (earlier) => {
  let kept = earlier.slice(-MAX_EXCHANGES);
  while (kept.length && bytes(kept) > settings.max_body / 2) kept = kept.slice(1);
  return kept;
};
const requestBody = (earlier, question, acceptance) => ({
  ...settings.params,
  model: settings.model,
  messages: [
    ...recent(earlier).flatMap((exchange) => [
      { role: "user", content: exchange.question },
      { role: "assistant", content: exchange.answer },
    ]),
    { role: "user", content: question },
  ],
  temperature: controls.temperature(),
  max_tokens: controls.max_new_tokens(),
  ...acceptance.params,
  truncation: "auto",
  stream: true,
  stream_options: { include_tokens: true },
  logprobs: true,
  top_logprobs: ALTERNATIVES,
});

// An answer as far as it has been received. Its finish is "stop" or "length" once it is complete,
// "stopped" or "failed" if it never will be.
class Answer {
  tokens = [];
  usage = {};
  finish = null;
  caret = make("span", { className: "fsd-caret", "aria-hidden": "true" });
  element = make("div", { className: "fsd-answer", "aria-busy": "true" }, this.caret);
  note = make("div", { className: "fsd-note" }, "Waiting in the queue …");
  bars = make("div", { className: "fsd-bars", role: "img" });
  flips = make("div", { className: "fsd-flips", role: "status" });

  constructor(acceptance) {
    this.acceptance = acceptance;
  }

  get complete() {
    return this.finish === "stop" || this.finish === "length";
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  add({ choices, usage }) {
    this.usage = usage ?? this.usage;
    const [choice] = choices;
    this.finish = choice?.finish_reason ?? this.finish;
    choice?.tokens?.forEach((token, index) => {
      const { token: piece, logprob, top_logprobs: top } = choice.logprobs?.content[index] ?? {};
      const probability = logprob === undefined ? null : Math.exp(logprob);
      const likely = (top ?? []).map((item) => [item.token, Math.exp(item.logprob)]);
      this.tokens.push({ ...token, piece, probability, top: likely });
      this.addSpan(this.tokens.at(-1));
    });
  }

  // A token without text is shown only where two answers differ first. One token of an answer is
  // focusable with the Tab key; the arrow keys move on from there.
  addSpan(token) {
    const first = !this.element.querySelector(TOKEN);
    const properties = {
      className: `fsd-token fsd-${token.origin}`,
      title: this.describe(token),
      tabIndex: first && token.text ? 0 : -1,
      hidden: !token.text,
    };
    const span = make("span", properties, token.text);
    const bar = make("i", { className: `fsd-bar fsd-${token.origin}` });
    if (token.divergence !== null) {
      // Rounding may leave it below 0.
      for (const node of [span, bar]) {
        node.style.setProperty("--d", Math.max(token.divergence, 0));
      }
    }
    this.caret.before(span);
    if (token.text) this.bars.append(bar);
  }

  describe(token) {
    const { origin, divergence, probability, top } = token;
    const lines = [`${quoted(shownText(token))} — ${origin}: ${LEGEND[origin]}`];
    lines.push(
      divergence === null
        ? "No draft distribution at this position"
        : `Divergence (${spelled(this.acceptance.divergence)}): ${divergence.toFixed(4)} (${this.acceptance.label})`,
    );
    if (probability !== null) lines.push(`Target probability: ${percent(probability)}`);
    if (top.length) {
      const likely = top.map(([other, value]) => `${quoted(other)} ${percent(value)}`);
      lines.push(`Top target tokens: ${likely.join(", ")}`);
    }
    return lines.join("\n");
  }

  // Update all but the tokens.
  render() {
    this.element.setAttribute("aria-busy", this.finish === null);
    if (this.finish !== null) this.caret.remove();
    const { usage } = this;
    const parts = [];
    if (usage.completion_tokens) {
      parts.push(
        `${usage.completion_tokens} tokens`,
        `tau ${usage.tau.toFixed(2)}`,
        `${usage.tokens_per_second.toFixed(0)} tokens/s`,
        `${fuzzyShare(usage)} fuzzy`,
        this.acceptance.label,
      );
    }
    if (usage.dropped_messages) {
      parts.push(`${usage.dropped_messages} oldest messages dropped to fit the context`);
    }
    if (this.finish in STATUSES) parts.push(STATUSES[this.finish]);
    if (parts.length) this.note.textContent = parts.join(" · ");
    const shown = this.tokens.filter((token) => token.text);
    this.bars.style.setProperty("--n", shown.length);
    this.bars.setAttribute("aria-label", this.summarizeDivergences(shown));
  }

  summarizeDivergences(shown) {
    const known = shown.filter((token) => token.divergence !== null);
    known.sort((one, other) => one.divergence - other.divergence);
    const summary = `${shown.length} tokens, ${known.length} with a divergence`;
    if (!known.length) return summary;
    const half = (known.length - 1) / 2;
    const median = (known[Math.floor(half)].divergence + known[Math.ceil(half)].divergence) / 2;
    const most = known.at(-1);
    const { threshold, label } = this.acceptance;
    const below = known.filter((token) => token.divergence < threshold).length;
    return (
      `${summary}: median ${median.toFixed(4)}, largest ${most.divergence.toFixed(4)} at` +
      ` ${quoted(most.text)}${threshold === undefined ? "" : `; ${below} below ${label}`}`
    );
  }

  strip() {
    const max = maxDivergence();
    const { threshold, divergence } = this.acceptance;
    const lowest = (max / 10 ** SCALE_DECADES).toFixed(9).replace(/\.?0+$/, "");
    const line = threshold === undefined ? "" : "; the line is at T";
    const caption = `Divergence of each token (${spelled(divergence)}, logarithmic, ${lowest} to ${max})${line}`;
    return make("figure", { className: "fsd-strip" },
      make("figcaption", {}, caption),
      make("div", { className: "fsd-scroll" }, this.bars), this.flips);
  }

  // Mark the first token that differs from another answer; past the end, mark the end.
  mark(index) {
    if (index === null || this.element.querySelector("mark")) return;
    const span = this.element.querySelectorAll(".fsd-token")[index] ?? make("span", {});
    const mark = make("mark", { className: "fsd-difference" });
    if (span.parentElement) span.replaceWith(mark);
    else this.element.append(mark);
    mark.append(span);
    span.hidden = false;
    span.textContent ||= this.tokens[index]?.piece || "∎";
    span.classList.add("fsd-differs");
  }

  // Receive the answer; returns an error message, or an empty string.
  async receive(body, signal, changed) {
    try {
      for await (const chunks of stream(body, signal)) {
        follow(() => {
          chunks.forEach((chunk) => this.add(chunk));
          if (this.tokens.length && this.finish === null) this.render();
          changed();
        });
      }
      if (this.finish === null) throw new Error("the connection was closed");
    } catch (error) {
      this.finish ??= signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) return error.message;
    } finally {
      follow(() => this.render());
    }
    return "";
  }
}

// Statistics of an answer beside those of autoregressive decoding.
const STATS = {
  "Tokens/s": (usage) => usage.tokens_per_second?.toFixed(1),
  "Tau (tokens per pass)": (usage) => usage.tau?.toFixed(2),
  "New tokens": (usage) => usage.completion_tokens,
  "Target passes": (usage) => usage.steps,
  "Fuzzy tokens": fuzzyShare,
};
const showStats = (fsd, baseline, placeholder = NONE) => {
  const rows = Object.entries(STATS).map(([name, format]) =>
    make("tr", {},
      make("th", { scope: "row" }, name),
      ...[fsd, baseline].map((usage) => make("td", {}, format(usage) ?? NONE))),
  );
  find("#fsd-stats").replaceChildren(...rows);
  const ratio = fsd.tokens_per_second / baseline.tokens_per_second;
  find("#fsd-speedup").textContent = ratio > 0 && ratio < Infinity ? `${ratio.toFixed(1)}x` : placeholder;
};

// Returns a valid question, or null after showing an error.
const readQuestion = (text, parent) => {
  const question = text.trim();
  let error = "";
  if (!settings) error = "The page is not ready yet.";
  else if (busy) error = "An answer is being generated. Stop it first.";
  else if (!question) error = "Enter a message first.";
  if (error) showError(parent, error);
  return error ? null : question;
};
// Run an answer or a comparison in place of a baseline. The job's second argument returns false
// once a new chat or other work has replaced it.
const run = async (job) => {
  work?.abort();
  const mine = (work = new AbortController());
  const active = () => work === mine;
  busy = true;
  stop.disabled = false;
  chat.scrollIntoView({ block: "nearest" });
  scrollToEnd();
  await job(mine.signal, active);
  if (!active()) return;
  work = null;
  busy = false;
  stop.disabled = true;
};
// Screen readers read what appears here, but not what is streamed.
const announce = (text) => {
  find("#fsd-announcement").textContent = text;
};
const send = async () => {
  const question = readQuestion(box.value, live);
  if (question === null) return;
  const acceptance = chosenAcceptance();
  const body = requestBody(exchanges, question, acceptance);
  const answer = (newest = new Answer(acceptance));
  log.append(...live.querySelectorAll(":scope > .fsd-message"));
  releaseExport();
  live.replaceChildren(questionMessage(question), message("Assistant", answer.element, answer.note));
  comparison.replaceChildren();
  box.value = "";
  describe("");
  announce("");
  showStats({}, {}, PENDING);
  await run(async (signal, active) => {
    const error = await answer.receive(body, signal, () => {
      if (!active()) return;
      showStats(answer.usage, {}, PENDING);
      if (answer.tokens.length && !answer.flips.isConnected) live.append(answer.strip());
      showThreshold();
    });
    if (!active()) return;
    announce([answer.text, STATUSES[answer.finish]].filter(Boolean).join(" "));
    follow(() => {
      if (answer.tokens.length) {
        exchanges.push({ question, answer: answer.text });
        live.append(exportLink(answer, body));
      }
    });
    if (error) showError(live, error);
    if ((error || !answer.tokens.length) && !box.value.trim()) box.value = question;
    busy = false;
    if (answer.complete) await measureBaseline(answer, body, signal, active);
    else showStats(answer.usage, {});
  });
};
// Decode the same prompt without the drafter, and without the details that the answer's tokens
// carry, which favors it: the speedup is not overstated.
const measureBaseline = async (answer, body, signal, active) => {
  const { fsd, logprobs, top_logprobs, ...rest } = body;
  const limited = { ...rest, method: "ar", max_tokens: Math.min(BASELINE_TOKENS, body.max_tokens) };
  const baseline = new Answer(answer.acceptance);
  await new Promise((done) => {
    setTimeout(done, BASELINE_DELAY);
    signal.addEventListener("abort", done);
  });
  if (!signal.aborted) {
    await baseline.receive(limited, signal, () => {
      if (active()) showStats(answer.usage, baseline.usage, PENDING);
    });
  }
  if (active()) showStats(answer.usage, baseline.usage);
};

// Decode a message, or else the last question, both exactly and as the controls say.
const compare = async () => {
  const again = !box.value.trim() && exchanges.length > 0;
  const earlier = again ? exchanges.slice(0, -1) : exchanges;
  const question = readQuestion(again ? exchanges.at(-1).question : box.value, comparison);
  if (question === null) return;
  const answers = [exactAcceptance(), chosenAcceptance()].map((item) => new Answer(item));
  const seed = settings.params.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
  const bodies = answers.map(({ acceptance }) => ({
    ...requestBody(earlier, question, acceptance),
    seed,
  }));
  const verdict = make("p", { className: "fsd-verdict", role: "status" });
  const columns = answers.map(({ acceptance: { name }, element, note }) =>
    make("section", { className: "fsd-column", "aria-label": name },
      make("h3", {}, name), element, note),
  );
  comparison.replaceChildren(
    ...(again ? [] : [questionMessage(question)]),
    make("div", { className: "fsd-comparison" },
      verdict, make("div", { className: "fsd-columns" }, ...columns)),
  );
  const show = () => {
    const text = describeDifference(...answers, bodies[0].temperature > 0);
    if (verdict.textContent !== text) verdict.textContent = text;
  };
  show();
  showStats({}, {});
  await run(async (signal, active) => {
    for (const [index, answer] of answers.entries()) {
      const error = await answer.receive(bodies[index], signal, () => {
        show();
        if (active() && index === 1) showStats(answer.usage, {});
      });
      if (error && active()) showError(comparison, error);
      if (!answer.complete) break;
    }
    for (const answer of answers) {
      answer.finish ??= signal.aborted ? "stopped" : "failed";
      answer.render();
    }
    follow(show);
  });
};
// If both answers are complete, one that is a prefix of the other differs at its end; otherwise
// only the tokens that both have are compared.
const describeDifference = (left, right, sampled) => {
  const complete = left.complete && right.complete;
  const lengths = [left.tokens.length, right.tokens.length];
  const length = complete ? Math.max(...lengths) : Math.min(...lengths);
  let index = 0;
  while (index < length && left.tokens[index]?.id === right.tokens[index]?.id) index += 1;
  let text = "";
  if (left.finish === null || right.finish === null) text = "Generating … ";
  else if (!complete) text = "Incomplete. ";
  if (index < length) {
    left.mark(index);
    right.mark(index);
    const [one, other] = [left, right].map(({ tokens }) =>
      tokens[index] ? quoted(shownText(tokens[index])) : "no further token",
    );
    text += `First difference at token ${index + 1}: exact ${one}, FSD ${other}.`;
  } else if (complete) {
    text += `The answers are identical (${length} tokens).`;
  } else {
    return `${text}No difference so far.`;
  }
  if (sampled) text += " With a temperature above 0, sampling alone may also cause differences.";
  return text;
};

const clear = () => {
  work?.abort();
  work = newest = null;
  busy = false;
  exchanges = [];
  releaseExport();
  for (const part of [log, live, comparison]) part.replaceChildren();
  box.value = "";
  stop.disabled = true;
  showStats({}, {});
  describe("");
  announce("");
};

// An answer with its prompt, settings and statistics, as a file.
const exportLink = (answer, body) => {
  const { messages, model, stream, stream_options, logprobs, top_logprobs, ...chosen } = body;
  const values = {
    model,
    messages,
    settings: chosen,
    answer: answer.text,
    finish_reason: answer.finish,
    stats: answer.usage,
    tokens: answer.tokens,
  };
  const file = new Blob([JSON.stringify(values, null, 1)], { type: "application/json" });
  const href = URL.createObjectURL(file);
  const properties = { className: "fsd-export", download: "eagle-fsd-answer.json", href };
  return make("a", properties, "Export as JSON");
};
const releaseExport = () => {
  const link = live.querySelector(".fsd-export");
  if (link) URL.revokeObjectURL(link.href);
};

// Sliders and drop-down lists. A number may lie between the steps of its slider.
const addControl = (control) => {
  const { name, label, info, choices, min, max, step, value, enabled } = control;
  const id = `fsd-${name.replaceAll("_", "-")}`;
  const common = { disabled: !enabled, "aria-describedby": `${id}-info` };
  const parts = [
    make("label", { htmlFor: `${id}-value` }, label),
    make("p", { id: `${id}-info` }, info),
  ];
  if (choices) {
    const options = choices.map((choice) => make("option", {}, choice));
    const list = make("select", { id: `${id}-value`, ...common }, ...options);
    list.value = value;
    controls[name] = () => list.value;
    parts.push(list);
  } else {
    const bounds = { min, max, step, ...common };
    const number = make("input", { type: "number", id: `${id}-value`, ...bounds });
    const range = make("input", { type: "range", "aria-label": label, ...bounds });
    const reset = { type: "button", className: "reset-button", title: `Reset ${label}` };
    const set = (chosen) => {
      const kept = Math.min(Math.max(chosen, min), max);
      range.value = number.value = step === 1 ? Math.round(kept) : kept;
      showThreshold();
    };
    set(value);
    range.addEventListener("input", () => set(Number(range.value)));
    number.addEventListener("input", () => {
      if (number.validity.rangeOverflow || number.validity.rangeUnderflow || !number.value) return;
      range.value = number.value;
      showThreshold();
    });
    number.addEventListener("change", () => set(Number(number.value || value)));
    controls[name] = () => Number(number.value || range.value);
    const button = make("button", { ...reset, disabled: !enabled }, "↺");
    button.addEventListener("click", () => set(value));
    parts.push(
      make("div", { className: "fsd-value" }, number, button),
      make("div", { className: "fsd-range" }, `${min}`, range, `${max}`),
    );
  }
  find("#fsd-controls").append(make("div", { id, className: "fsd-control" }, ...parts));
};

// The strip's line follows the slider. A token may flip if the slider's T no longer admits it, or
// admits drafted tokens in its place where the answer's T did not.
const showThreshold = () => {
  if (!newest?.flips.isConnected) return;
  const { threshold: decoded, divergence } = newest.acceptance;
  const threshold = controls.threshold();
  const comparable = decoded !== undefined && controls.divergence() === divergence;
  const flips = ({ origin, divergence: value }) => {
    if (value === null) return false;
    if (origin === "fuzzy") return value >= threshold;
    return decoded <= value && value < threshold;
  };
  const shown = newest.tokens.filter((token) => token.text);
  const spans = newest.element.querySelectorAll(TOKEN);
  const texts = [];
  shown.forEach((token, index) => {
    const flipped = comparable && flips(token);
    for (const node of [spans[index], newest.bars.children[index]]) {
      node.classList.toggle("fsd-flip", flipped);
    }
    if (flipped) texts.push(quoted(token.text));
  });
  newest.bars.classList.toggle("fsd-with-line", decoded !== undefined);
  newest.bars.style.setProperty("--fsd-t", comparable ? threshold : decoded ?? 0);
  const count = texts.length === 1 ? "1 token may flip:" : `${texts.length} tokens may flip:`;
  const some = texts.slice(0, 12).join(" ") + (texts.length > 12 ? " …" : "");
  let text = `At T = ${threshold}, ${texts.length ? `${count} ${some}` : "no token would flip."}`;
  if (decoded === undefined) text = "";
  else if (!comparable) {
    text = `The strip shows ${divergence}, not the divergence that is selected now.`;
  }
  if (newest.flips.textContent !== text) newest.flips.textContent = text;
};

// Token inspection by pointer and keyboard.
const closest = (event, selector) =>
  event.target instanceof Element ? event.target.closest(selector) : null;
const describe = (text) => {
  inspector.textContent = text;
};
const inspect = (event) => {
  const bar = closest(event, ".fsd-bar");
  const token = bar
    ? live.querySelectorAll(TOKEN)[[...bar.parentElement.children].indexOf(bar)]
    : closest(event, TOKEN);
  if (token) describe(token.title);
};
document.addEventListener("focusin", inspect);
document.addEventListener("mouseover", inspect);
// On a narrow page the inspector is above the chat: a tap elsewhere closes it.
document.addEventListener("click", (event) => {
  if (!closest(event, `${TOKEN}, .fsd-bar, #fsd-inspector`)) describe("");
});

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
// Safari ends a composition before the key that confirms it.
const isComposing = (event) => event.isComposing || event.keyCode === 229;
document.addEventListener("keydown", (event) => {
  if (isComposing(event)) return;
  const token = closest(event, TOKEN);
  if (event.key === "Escape") {
    // While a token is inspected, Escape closes the inspector only.
    if (!token || !inspector.textContent) stop.click();
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

const onClick = (name, action) => {
  find(`#fsd-${name}`).addEventListener("click", () => {
    action();
    if (name !== "compare-button") box.focus();
  });
};
onClick("stop", () => work?.abort());
onClick("clear", clear);
onClick("compare-button", compare);
find("#fsd-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
  box.focus();
});
box.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
  event.preventDefault();
  send();
});
find("#fsd-controls").addEventListener("change", showThreshold);

// The back/forward cache may keep the connection of a page that was left.
window.addEventListener("pagehide", () => work?.abort());

const load = async () => {
  try {
    settings = await (await request("page.json")).json();
  } catch (error) {
    showError(live, error.message);
    return;
  }
  live.replaceChildren();
  find("#fsd-model").textContent = settings.model;
  settings.controls.forEach(addControl);
  document.body.style.setProperty("--fsd-max", maxDivergence());
  for (const example of settings.examples) {
    const button = make("button", { type: "button" }, example);
    button.addEventListener("click", () => {
      box.value = example;
      box.focus();
    });
    find("#fsd-examples").append(button);
  }
};
find("#fsd-key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = find("#fsd-key input");
  sessionStorage.setItem(KEY, field.value.trim());
  field.value = "";
  find("#fsd-key").hidden = true;
  box.focus();
  if (!settings) load();
});
for (const [name, text] of Object.entries(LEGEND)) {
  find(".fsd-legend").append(
    make("li", {},
      make("span", { className: `fsd-token fsd-${name}` }, name), make("small", {}, text)),
  );
}
showStats({}, {});
load();
