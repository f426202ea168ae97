"use strict";
// Runs the script of the page of latents without a browser: what the page shows at first and after each action, as JSON.
const { readFileSync } = require("node:fs");
const vm = require("node:vm");

class FakeElement {
  constructor(name) {
    Object.assign(this, { name, className: "", style: {}, children: [], checked: false, hidden: false });
    this.listeners = {};
    this.held = "";
  }

  get value() {
    return this.held;
  }

  set value(value) {
    this.held = String(value);
  }

  get textContent() {
    return this.children.map((child) => (typeof child === "string" ? child : child.textContent)).join("");
  }

  set textContent(text) {
    this.children = [String(text)];
  }

  append(...children) {
    this.children.push(...children);
  }

  replaceChildren(...children) {
    this.children = children;
  }

  addEventListener(kind, heard) {
    this.listeners[kind] = heard;
  }
}

function plain(element) {
  if (typeof element === "string") return element;
  const { name, className, style } = element;
  return { name, className, style, text: element.textContent, children: element.children.map(plain) };
}

const { script, data, ids, actions } = JSON.parse(readFileSync(0, "utf8"));
const elements = Object.fromEntries(ids.map((id) => [id, new FakeElement(id)]));
elements.data.textContent = data;
const waiting = [];
vm.runInNewContext(script, {
  document: {
    getElementById: (id) => elements[id] ?? null,
    createElement: (name) => new FakeElement(name),
  },
  setTimeout: (work) => waiting.push(work),
  clearTimeout: () => waiting.splice(0),
});

function seen() {
  const options = (id) => elements[id].children.map((option) => [option.value, option.textContent]);
  return {
    found: elements.found.textContent,
    more: !elements.more.hidden,
    offered: { verdict: options("verdict"), site: options("site"), sort: options("sort") },
    cards: elements.list.children.map(plain),
  };
}

const shown = [seen()];
for (const { id, event, ...changes } of actions) {
  Object.assign(elements[id], changes);
  elements[id].listeners[event]({ preventDefault: () => {} });
  waiting.splice(0).forEach((work) => work());
  shown.push(seen());
}
process.stdout.write(JSON.stringify(shown));
