// Asks the server every second which parts have changed, and changes only what differs, so that open details, the
// selection and the scroll position stay.
{
  const parts = document.getElementById("parts"), connection = document.getElementById("connection");
  const kept = new Set(["open"]); // attributes that the reader sets
  const isOwn = (node) => node.nodeType === 1 && (node.classList.contains("tip") || node.classList.contains("cursor"));
  const merge = (old, next) => {
    if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName) return old.replaceWith(next);
    if (old.nodeType !== 1) {
      if (old.nodeValue !== next.nodeValue) old.nodeValue = next.nodeValue;
      return;
    }
    for (const { name } of [...old.attributes]) if (!next.hasAttribute(name) && !kept.has(name)) old.removeAttribute(name);
    for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    mergeChildren(old, next);
  };
  const mergeChildren = (old, next) => {
    const before = [...old.childNodes].filter((node) => !isOwn(node));
    const after = [...next.childNodes].filter((node) => !isOwn(node));
    after.forEach((node, i) => before[i] ? merge(before[i], node) : old.append(node));
    before.slice(after.length).forEach((node) => node.remove());
    if (old.nodeName === "svg" && !old.querySelector(".cursor")) {
      const cursor = next.querySelector(".cursor");
      if (cursor) old.append(cursor);
    }
  };
  const ask = async () => {
    const seen = [...parts.children].map((part) => `${part.id.slice(5)}:${part.dataset.digest}`).join(",");
    const answer = await fetch(`${parts.dataset.state}${parts.dataset.state.includes("?") ? "&" : "?"}seen=${seen}`);
    if (!answer.ok) throw new Error(answer.status);
    const { title, parts: changed } = await answer.json();
    document.title = title;
    for (const [name, digest, html] of changed) {
      let part = document.getElementById(`part-${name}`);
      if (!part) {
        part = document.createElement("div");
        part.id = `part-${name}`;
        parts.append(part);
      }
      const template = document.createElement("template");
      template.innerHTML = html;
      mergeChildren(part, template.content);
      part.dataset.digest = digest;
    }
  };
  const again = async () => {
    if (!document.hidden) {
      try {
        await ask();
        connection.hidden = true;
      } catch {
        connection.hidden = false;
      }
    }
    setTimeout(again, 1000);
  };
  document.addEventListener("visibilitychange", () => document.hidden || ask().catch(() => {}));
  setTimeout(again, 1000);
}
