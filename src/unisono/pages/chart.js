// Shows the values under the pointer, also in charts that the page gets later. The page is complete without it.
{
  const tip = document.createElement("div"), parsed = new WeakMap();
  let shown = null;
  tip.className = "tip";
  tip.hidden = true;
  const data = (element, text) => {
    if (parsed.get(element)?.text !== text) parsed.set(element, { text, value: JSON.parse(text) });
    return parsed.get(element).value;
  };
  const nearest = (sorted, x) => {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
  };
  const hide = () => {
    tip.hidden = true;
    shown?.querySelector(".cursor")?.setAttribute("visibility", "hidden");
    shown = null;
  };
  const show = (svg, event) => {
    const plot = data(svg, svg.dataset.plot), cursor = svg.querySelector(".cursor");
    const lines = [...svg.querySelectorAll(".series")].map((line) => data(line, line.dataset.values));
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const fraction = ((event.clientX - box.left) * scale - plot.left) / (plot.right - plot.left);
    if (fraction < -0.02 || fraction > 1.02 || !lines.length) return hide();
    const target = plot.x[0] + fraction * (plot.x[1] - plot.x[0]);
    const indices = lines.map((line) => nearest(line.x, target));
    const at = lines.map((line, i) => line.x[indices[i]]).reduce((a, b) => Math.abs(b - target) < Math.abs(a - target) ? b : a);
    const place = plot.left + (at - plot.x[0]) / (plot.x[1] - plot.x[0]) * (plot.right - plot.left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    const values = lines.map((line, i) => {
      const x = line.x[indices[i]], away = x === at ? "" : ` (${plot.name} ${x.toLocaleString("en")})`;
      return `${line.name} ${line.y[indices[i]].toLocaleString("en", { maximumSignificantDigits: 5 })}${plot.unit ? " " + plot.unit : ""}${away}`;
    });
    tip.textContent = [`${plot.name} ${at.toLocaleString("en")}`, ...values].join("\n");
    if (tip.parentNode !== svg.parentNode) svg.parentNode.append(tip);
    tip.hidden = false;
    shown = svg;
    const card = svg.parentNode.getBoundingClientRect();
    const left = box.left - card.left + place / scale + 12;
    tip.style.left = `${left + tip.offsetWidth > card.width ? left - tip.offsetWidth - 24 : left}px`;
    tip.style.top = `${Math.max(event.clientY - card.top - tip.offsetHeight - 8, 0)}px`;
  };
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("svg[data-plot]");
    if (shown && shown !== svg) hide();
    if (svg) show(svg, event);
  });
  document.documentElement.addEventListener("pointerleave", hide);
}
