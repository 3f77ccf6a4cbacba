// Clicks on the timeline seek in the whole video. Without this script, the links open the video at the same times.
const whole = document.getElementById("whole"), timeline = document.querySelector("svg[data-duration]");
if (whole && timeline) {
  const duration = Number(timeline.dataset.duration);
  const head = timeline.querySelector(".head");
  let until = Infinity;
  const seek = (start, end) => {
    until = end;
    whole.currentTime = start;
    whole.play().catch(() => {});
  };
  timeline.classList.add("seekable");
  document.getElementById("how").hidden = false;
  timeline.addEventListener("click", (event) => {
    if (event.target.closest("a")) return;
    const box = timeline.getBoundingClientRect();
    seek(Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * duration, Infinity);
  });
  for (const link of document.querySelectorAll("a[data-start]")) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      seek(Number(link.dataset.start), Number(link.dataset.end));
      if (!timeline.contains(link)) whole.scrollIntoView({ block: "nearest" });
    });
  }
  whole.addEventListener("timeupdate", () => {
    const place = `${(100 * whole.currentTime) / duration}%`;
    head.setAttribute("x1", place);
    head.setAttribute("x2", place);
    head.setAttribute("visibility", "visible");
    if (whole.currentTime >= until) {
      until = Infinity;
      whole.pause();
    }
  });
}
