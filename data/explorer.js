// What the widgets of the attention explorer cannot do, in JupyterLab.
(() => {
  if (window.c2lipExplorer) return;
  window.c2lipExplorer = true;
  const panels = () => document.querySelectorAll('.c2lip-explorer');
  const inside = e => e.closest && e.closest('.c2lip-explorer');
  let typed = null; // the field that has the focus, and what was typed into it and not yet sent

  // JupyterLab takes the keys of what has the focus for its own shortcuts
  document.addEventListener('focusin', e => inside(e.target) && e.target.setAttribute('data-lm-suppress-shortcuts', ''));
  document.addEventListener('input', e => {
    if (inside(e.target)) typed = e.target.type == 'text' ? [e.target, e.target.value] : null;
  }, true);
  for (const end of ['change', 'focusout'])
    document.addEventListener(end, e => { if (inside(e.target)) typed = null; }, true);

  // a click on an image of the gallery is one on its button
  document.addEventListener('click', e => {
    if (e.target.matches('.c2lip-shelf img')) e.target.closest('.widget-vbox').querySelector('button').click();
  });

  const call = (e, name) => { if (name && e.getAttribute('aria-label') != name) e.setAttribute('aria-label', name); };
  const mend = panel => {
    for (const e of panel.querySelectorAll('.c2lip-live:not([aria-live])')) e.setAttribute('aria-live', 'polite');
    for (const e of panel.querySelectorAll('.noUi-handle'))
      call(e, e.closest('.widget-slider').querySelector('label').textContent);
    for (const e of panel.querySelectorAll('button')) if (!/[a-z]/i.test(e.textContent)) call(e, e.title);
    for (const e of panel.querySelectorAll('.widget-upload')) call(e, 'upload an image');
    for (const e of panel.querySelectorAll('a[download]:not([data-taken])')) {
      e.setAttribute('data-taken', '');
      e.click();
    }
  };
  const answer = () => {
    if (typed && typed[0] == document.activeElement && typed[0].value != typed[1]) typed[0].value = typed[1];
    panels().forEach(mend);
  };
  new MutationObserver(answer).observe(document.body, {childList: true, subtree: true});
  answer();
})();
