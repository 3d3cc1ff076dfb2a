// What a reader could not read on this page, as lines; empty if all is well. Called with no arguments, in the page.
async () => {
  const found = [];
  const say = (kind, what) => found.push(`${kind}: ${what}`);
  const shown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const name = (element) => `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ""}`;

  const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const charts = [...document.querySelectorAll(".js-plotly-plot")].filter(shown);
  const fits = (chart) => Math.abs(chart.querySelector(".main-svg")?.getBoundingClientRect().width - chart.clientWidth) < 1;
  for (let tries = 0; tries < 100 && !charts.every(fits); tries++) await wait(50);  // charts follow the window's width
  for (const animation of document.getAnimations()) animation.finish();

  if (document.documentElement.scrollWidth > innerWidth) say("page scrolls sideways", document.documentElement.scrollWidth);

  // --- texts, each with the rectangles of its lines; a formula is one text
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const formulas = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || !shown(parent) || parent.closest("script, style, option, defs, noscript, .hoverlayer, .md-skip, .md-search__output")) continue;
    const formula = parent.closest("math");
    if (formula && formulas.has(formula)) continue;
    if (formula) formulas.add(formula);
    const range = document.createRange();
    range.selectNodeContents(formula ?? node);
    const rects = formula ? [formula.getBoundingClientRect()] : [...range.getClientRects()];
    texts.push({ element: formula ?? parent, said: (formula ?? node).textContent.trim().slice(0, 40), rects: rects.filter((r) => r.width > 1 && r.height > 1) });
  }

  // --- cut text: beyond an ancestor that hides what leaves it; where one scrolls, what it shows is what counts
  const boxes = [];
  for (const text of texts) {
    for (const rect of text.rects) {
      let box = { left: rect.left, right: rect.right, top: rect.top, bottom: rect.bottom };
      for (let up = text.element; up && up !== document.body; up = up.parentElement) {
        const style = getComputedStyle(up);
        const frame = up.getBoundingClientRect();
        for (const [axis, from, to] of [["overflowX", "left", "right"], ["overflowY", "top", "bottom"]]) {
          if (style[axis] === "visible" || style.display === "inline") continue;
          const beyond = Math.max(frame[from] - box[from], box[to] - frame[to]);
          if (["hidden", "clip"].includes(style[axis]) && beyond > 2 && box[to] > frame[from] && box[from] < frame[to]) say("cut text", `"${text.said}" by ${Math.round(beyond)} px in ${name(up)}`);
          box[from] = Math.max(box[from], frame[from]);
          box[to] = Math.min(box[to], frame[to]);
        }
      }
      if (Math.min(box.right, innerWidth) - Math.max(box.left, 0) > 1 && box.bottom - box.top > 1) boxes.push({ ...box, text });
    }
  }

  // --- texts on texts; letters reach less high and low than their boxes
  boxes.sort((a, b) => a.top - b.top);
  const layer = (element) => {  // what moves by itself may come to lie over the rest
    for (let up = element; up; up = up.parentElement) if (["sticky", "fixed"].includes(getComputedStyle(up).position)) return up;
    return null;
  };
  for (let i = 0; i < boxes.length; i++) {
    for (let j = i + 1; j < boxes.length && boxes[j].top < boxes[i].bottom; j++) {
      const [a, b] = [boxes[i], boxes[j]];
      if (a.text === b.text) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - b.top;
      const little = 0.35 * Math.min(a.bottom - a.top, b.bottom - b.top);
      if (across > 2 && down > little && layer(a.text.element) === layer(b.text.element)) say("overlap", `"${a.text.said}" and "${b.text.said}"`);
    }
  }

  // --- charts have something within their axes
  for (const chart of charts) {
    const plot = chart.querySelector(".nsewdrag").getBoundingClientRect();
    const marks = [...chart.querySelectorAll(".cartesianlayer :is(path.js-line, .points path, .point path, image, text)")];
    const within = marks.filter((mark) => {
      const { left, right, top, bottom } = mark.getBoundingClientRect();
      return Math.max(right - left, bottom - top) > 1 && right > plot.left - 6 && left < plot.right + 6 && bottom > plot.top - 6 && top < plot.bottom + 6;
    });
    if (!within.length) say("empty chart", chart.id || chart.parentElement.textContent.slice(0, 40));
  }

  // --- contrast, as the web's accessibility guidelines measure it
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return { rgb: [r, g, b], a: a / 255 };
  };
  const over = (top, alpha, below) => top.map((value, c) => alpha * value + (1 - alpha) * below[c]);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const cells = [];
  for (const image of document.querySelectorAll(".js-plotly-plot .hm image")) {
    const picture = new Image();
    picture.src = image.href.baseVal;
    await picture.decode();
    const whole = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
    whole.drawImage(picture, 0, 0);
    cells.push({ whole, rect: image.getBoundingClientRect(), picture });
  }
  const background = (element, at) => {
    const layers = [];
    for (const { whole, rect, picture } of element.closest(".js-plotly-plot") ? cells : []) {
      if (at.x < rect.left || at.x > rect.right || at.y < rect.top || at.y > rect.bottom) continue;
      const pixel = [(at.x - rect.left) / rect.width * picture.width, (at.y - rect.top) / rect.height * picture.height];
      const [r, g, b, a] = whole.getImageData(Math.min(pixel[0], picture.width - 1), Math.min(pixel[1], picture.height - 1), 1, 1).data;
      layers.push({ rgb: [r, g, b], a: a / 255 });
    }
    for (let up = element; up; up = up.parentElement) layers.push(rgba(getComputedStyle(up).backgroundColor));
    return layers.reduceRight((below, { rgb, a }) => over(rgb, a, below), [255, 255, 255]);
  };
  for (const { element, said, rects } of texts) {
    if (!rects.length || rects[0].right < 0) continue;
    const style = getComputedStyle(element);
    const ink = rgba(element instanceof SVGElement ? style.fill : style.color);
    let alpha = ink.a;
    for (let up = element; up; up = up.parentElement) alpha *= Number(getComputedStyle(up).opacity);
    const middle = { x: (rects[0].left + rects[0].right) / 2, y: rects[0].top + 2 };
    const paper = background(element, middle);
    const [low, high] = [luminance(paper), luminance(over(ink.rgb, alpha, paper))].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) say("faint text", `"${said}" at ${ratio.toFixed(1)}`);
  }
  return [...new Set(found)];
}
