// Shows the values under the pointer. The page is complete without it.
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const plot = JSON.parse(svg.dataset.plot), cursor = svg.querySelector(".cursor");
  const lines = [...svg.querySelectorAll(".series")].map((line) => JSON.parse(line.dataset.values));
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.parentNode.append(tip);
  const nearest = (sorted, x) => {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
  };
  const show = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const fraction = ((event.clientX - box.left) * scale - plot.left) / (plot.right - plot.left);
    if (fraction < -0.02 || fraction > 1.02) return hide();
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
    tip.hidden = false;
    const card = svg.parentNode.getBoundingClientRect();
    const left = box.left - card.left + place / scale + 12;
    tip.style.left = `${left + tip.offsetWidth > card.width ? left - tip.offsetWidth - 24 : left}px`;
    tip.style.top = `${Math.max(event.clientY - card.top - tip.offsetHeight - 8, 0)}px`;
  };
  const hide = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerleave", hide);
}
