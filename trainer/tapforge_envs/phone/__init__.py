"""The simulated phone: one JSON state, screens rendered from it, tasks with exact judges. Pure Python and Pillow.

What it is     `device` the phone, an image, a shell · `tasks` templates and splits · `catalog` the suites
Pixels         `screen` widgets in relative boxes · `glyphs`, `pen`, `surfaces`, `overlays`, `draw`
quickstart     a small image for a tiny model, in one file
standard       `standard` the image · `view`, `layout`, `keyboard`, `shell` how apps are written and used · `apps` ·
               `judge` · `templates` · `demonstrator` plays a template's plan
Made tasks     `walks` by playing forward · `own_check` a task that says its check · `difference` of contents
Over HTTP      `server` and `slot`, `faults` on demand · `mobileworld`
Over adb       `adbd`
"""
