"""Style sheet of the live page, light and dark, as Python text so that it is part of every installation.

The page's document: header, tabs and panels stand in the HTML itself, around the element that Gradio fills.

Gradio loads its scripts for more than a second, and only the controls need them: what is chosen by the address is asked
for and drawn meanwhile.
"""

from __future__ import annotations

from typing import Any

from posttrain.monitor.script import PAGE_SCRIPT
from posttrain.monitor.views import TAB_NAMES

STYLE_SHEET = """
:root{--pt-ink:#1f2630;--pt-faint:#5d6875;--pt-card:#fff;--pt-line:#dde2e8;--pt-tint:#f2f5f8;--pt-good:#1f7a3d;
--pt-goodbg:#e0f3e6;--pt-bad:#a63a00;--pt-badbg:#fde9dd;--pt-info:#0060a0;--pt-infobg:#e0effa;--pt-mark:#8a5a00;
--c0:#0a6ebd;--c1:#d1590a;--c2:#158a5c;--c3:#b3388f;--c4:#8a6d00;--c5:#5b55c9;--c6:#c23434;--c7:#4a6572}
.dark{--pt-ink:#e4e8ed;--pt-faint:#9aa6b3;--pt-card:#1b1f26;--pt-line:#343b45;--pt-tint:#242a33;--pt-good:#7ed99a;
--pt-goodbg:#173323;--pt-bad:#ffab78;--pt-badbg:#442412;--pt-info:#86c6f5;--pt-infobg:#14324a;--pt-mark:#e0b050;
--c0:#62b3f5;--c1:#ff9d5c;--c2:#5fd3a2;--c3:#ee8fd2;--c4:#e3c455;--c5:#a9a4ff;--c6:#ff8686;--c7:#a4bccb}
.pt-page{box-sizing:border-box;width:100%;max-width:1784px;margin:0 auto;padding:10px 32px}
.pt-page *,.pt-page ::before{box-sizing:border-box}
.gradio-container{max-width:none!important;min-height:0!important;padding:0!important;background:none!important}
.gradio-container main{max-width:none!important;margin:0!important;padding:0!important}
.main.fillable{padding:0!important}
/* heights of Gradio's controls, which come after the charts: nothing moves when they do */
#pt-place{min-height:94px;margin:8px 0 12px}
#pt-controls{--slider-color:var(--c0)}
#pt-of-curves,#pt-of-trajectories{--checkbox-background-color-selected:var(--c0);
--checkbox-border-color-selected:var(--c0)}
/* one line of chosen runs, whatever their number, so that nothing moves when one is chosen */
#pt-controls .wrap-inner{flex-wrap:nowrap!important;overflow-x:auto;overflow-y:hidden;scrollbar-width:none}
#pt-controls .token{flex:0 1 auto;min-width:96px;margin-top:0;margin-bottom:0;padding-top:0;padding-bottom:0}
#pt-controls .token>span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
#pt-controls .wrap-inner:has(.token) .secondary-wrap{flex:1 0 54px!important;min-width:0}
#pt-controls input[role=combobox]{text-overflow:ellipsis}
#pt-controls .secondary-wrap:not(:has(.token-remove))>input[role=combobox]{padding-right:26px!important}
@media (max-width:1175px){#pt-place{min-height:180px}}
@media (max-width:700px){#pt-place{min-height:239px}}
@media (max-width:400px){#pt-place{min-height:269px}}
#pt-lists,#pt-of-curves,#pt-of-trajectories{display:none!important}
[data-tab=curves] #pt-of-curves,[data-tab=trajectories] #pt-of-trajectories{display:flex!important}
.pt-tabs{display:flex;flex-wrap:wrap;gap:2px 4px;border-bottom:1px solid var(--pt-line);margin-bottom:14px}
.pt-tabs button{border:0;border-bottom:2px solid transparent;background:none;color:var(--pt-faint);padding:7px 13px;
margin-bottom:-1px;font:inherit;font-weight:500;cursor:pointer}
.pt-tabs button:hover{color:var(--pt-ink)}
.pt-tabs button[aria-selected=true]{color:var(--pt-info);border-color:var(--pt-info)}
.pt-panel[hidden]{display:none}
.pt-lost .pt-time::before{content:"the server of this page does not answer \\b7  ";color:var(--pt-bad)}
.pt-lost .pt-header:empty::before{content:"the server of this page does not answer";color:var(--pt-bad)}
.gradio-container main.contain{min-width:0!important;width:100%!important;max-width:100%!important}
.gradio-container .html-container{padding:0!important}
footer{display:none!important}
.pt-page,.pt-panel{color:var(--pt-ink);font:14px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;
font-variant-numeric:tabular-nums}
.pt-header{display:flex;flex-wrap:wrap;align-items:center;gap:6px 14px;min-height:34px;color:var(--pt-ink);
font:14px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;font-variant-numeric:tabular-nums}
.pt-name{font-size:18px;overflow-wrap:anywhere;min-width:0}
.pt-progress{width:180px;height:8px;flex:none}
.pt-time{color:var(--pt-faint);margin-left:auto}
.pt-why{flex-basis:100%;color:var(--pt-faint)}
.pt-badge{display:inline-block;border-radius:10px;padding:0 9px;font-size:12.5px;font-weight:600;line-height:20px;
background:var(--pt-tint);color:var(--pt-faint);white-space:nowrap}
.pt-badge.good{background:var(--pt-goodbg);color:var(--pt-good)}
.pt-badge.bad{background:var(--pt-badbg);color:var(--pt-bad)}
.pt-badge.info{background:var(--pt-infobg);color:var(--pt-info)}
.pt-block{margin:0 0 18px}
.pt-h{font-size:15px;font-weight:600;margin:0 0 4px;color:var(--pt-ink)}
.pt-h:empty,.pt-note:empty{display:none}
.pt-note{color:var(--pt-faint);margin:0 0 8px}
.pt-faint{color:var(--pt-faint)}
.pt-tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
.pt-tile{background:var(--pt-card);border:1px solid var(--pt-line);border-radius:8px;padding:9px 13px;min-width:0}
.pt-tile span,.pt-tile small{display:block;color:var(--pt-faint);font-size:12.5px;overflow-wrap:anywhere}
.pt-tile b{font-size:20px;font-weight:600;white-space:nowrap}
.pt-charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:12px}
.pt-charts.even{grid-template-columns:repeat(auto-fit,minmax(max(400px,40%),1fr))}
.pt-chart{background:var(--pt-card);border:1px solid var(--pt-line);border-radius:8px;padding:10px 12px 6px;min-width:0;
display:flex;flex-direction:column}
.pt-title{display:flex;gap:8px;align-items:baseline}
.pt-title b{font-weight:600;overflow-wrap:anywhere}
.pt-title span{color:var(--pt-faint);font-size:12.5px}
.pt-reset{margin-left:auto;cursor:pointer;color:var(--pt-info)!important;font-size:12.5px}
.pt-legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:2px 0 4px;min-height:20px}
.pt-legend.one{flex-wrap:nowrap;overflow-x:auto;scrollbar-width:none}
.pt-legend.one .pt-key{white-space:nowrap;flex:none}
.pt-key{display:inline-flex;align-items:center;gap:6px;cursor:pointer;font-size:12.5px;color:var(--pt-faint);
overflow-wrap:anywhere}
.pt-key i{width:16px;height:0;flex:none}
.pt-key b{color:var(--pt-ink);font-weight:600}
.pt-key.off{opacity:.4;text-decoration:line-through}
.pt-plot{position:relative;margin-top:auto;cursor:crosshair;touch-action:pan-y;user-select:none;min-height:226px}
.pt-plot svg{display:block;overflow:visible}
.pt-plot text{font:11.5px system-ui,sans-serif;fill:var(--pt-faint)}
.pt-grid{stroke:var(--pt-line);stroke-width:1}
.pt-mark{stroke:var(--pt-faint);stroke-dasharray:3 3}
.pt-mark.rollback{stroke:var(--pt-bad)}
.pt-plot .pt-mark-label{fill:var(--pt-faint);font-size:11px;paint-order:stroke;stroke:var(--pt-card);stroke-width:3px}
.pt-cross{stroke:var(--pt-faint);stroke-width:.8}
.pt-drag{fill:var(--pt-info);opacity:.14}
.pt-tip{display:none;position:absolute;top:6px;z-index:5;pointer-events:none;background:var(--pt-card);
border:1px solid var(--pt-line);border-radius:6px;padding:5px 9px;font-size:12.5px;box-shadow:0 2px 8px #0002;
max-width:70%}
.pt-tip div{display:flex;gap:7px;align-items:center;white-space:nowrap}
.pt-tip i{width:8px;height:8px;border-radius:50%;flex:none}
.pt-tip b{margin-left:auto;padding-left:8px}
.pt-scroll{overflow-x:auto;border:1px solid var(--pt-line);border-radius:8px;background:var(--pt-card)}
.pt-scroll.narrow{width:max-content;max-width:100%}
.pt-scroll.narrow th,.pt-scroll.narrow td{padding-left:20px;padding-right:20px}
.pt-panel table{border-collapse:collapse;width:100%;margin:0;font-size:13.5px}
.pt-panel th,.pt-panel td{padding:6px 12px;border:0;border-bottom:1px solid var(--pt-line);text-align:left;
white-space:nowrap;color:var(--pt-ink)}
.pt-panel th{color:var(--pt-faint);font-weight:600;font-size:12.5px;background:none}
.pt-panel tr:last-child td{border-bottom:0}
.pt-panel tbody tr{background:none}
.pt-panel .num{text-align:right}
.pt-panel td.text{white-space:normal;min-width:260px}
.pt-panel td.faint{color:var(--pt-faint)}
.pt-bar{display:inline-block;vertical-align:middle;width:90px;height:7px;border-radius:4px;background:var(--pt-line);
overflow:hidden;margin-right:9px}
.pt-bar i{display:block;height:100%;background:var(--c0);border-radius:4px;transition:width .3s}
.pt-bars{display:grid;gap:6px;max-width:760px}
.pt-share{display:grid;grid-template-columns:minmax(80px,26%) 1fr 128px;gap:12px;align-items:center}
.pt-share span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;color:var(--pt-ink)}
.pt-share b{font-weight:600;text-align:right;color:var(--pt-ink)}
.pt-sharebar{height:14px;border-radius:4px;background:var(--pt-line);overflow:hidden}
.pt-sharebar i{display:block;height:100%;transition:width .3s}
.pt-message{background:var(--pt-card);border:1px solid var(--pt-line);border-radius:8px;padding:18px 22px}
.pt-message.small{padding:8px 14px}
.pt-message.small h3{font-size:14px;font-weight:400;margin:0}
.pt-message.bad{background:var(--pt-badbg);border-color:var(--pt-bad)}
.pt-message h3{margin:0 0 6px;font-size:16px;color:var(--pt-ink)}
.pt-message p{margin:0 0 6px;color:var(--pt-faint)}
.pt-message pre,.pt-episodes pre{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,monospace}
.pt-message pre{background:var(--pt-tint);border-radius:5px;padding:7px 11px;margin:0 0 6px;white-space:pre-wrap;
overflow-wrap:anywhere}
.pt-links{display:flex;flex-wrap:wrap;gap:10px}
.pt-links a{display:block;background:var(--pt-card);border:1px solid var(--pt-line);border-radius:8px;padding:10px 15px;
color:var(--pt-ink)!important;text-decoration:none!important;min-width:230px;flex:1}
.pt-links a:hover{border-color:var(--pt-info)}
.pt-links b,.pt-links span{display:block}
.pt-links span{color:var(--pt-faint);font-size:12.5px}
.pt-episodes{display:grid;grid-template-columns:minmax(280px,2fr) 3fr;gap:14px;align-items:start}
.pt-list{max-height:640px;overflow-y:auto;border:1px solid var(--pt-line);border-radius:8px;background:var(--pt-card)}
.pt-row{display:grid;grid-template-columns:64px 1fr;gap:1px 8px;width:100%;text-align:left;padding:7px 11px;border:0;
border-bottom:1px solid var(--pt-line);background:none;color:var(--pt-ink);cursor:pointer;font-size:13.5px}
.pt-row b{font-weight:500;overflow-wrap:anywhere}
.pt-row .pt-badge{justify-self:start;align-self:start}
.pt-row small{grid-column:2;color:var(--pt-faint)}
.pt-row.chosen,.pt-row:hover{background:var(--pt-tint)}
.pt-row.chosen{box-shadow:inset 3px 0 0 var(--c0)}
.pt-episode{border:1px solid var(--pt-line);border-radius:8px;background:var(--pt-card);padding:14px 18px;min-width:0}
.pt-episode:empty{display:none}
.pt-question{display:flex;gap:18px;align-items:flex-start;margin-bottom:12px}
.pt-question img{width:190px;border-radius:6px;image-rendering:pixelated;border:1px solid var(--pt-line);flex:none}
.pt-question img[hidden]{display:none}
.pt-question h3{margin:0 0 2px;font-size:16px;color:var(--pt-ink)}
.pt-question p{margin:0 0 8px}
.pt-question dl{display:grid;grid-template-columns:max-content 1fr;gap:1px 14px;margin:0;font-size:13.5px}
.pt-question dt{color:var(--pt-faint)}
.pt-question dd{margin:0;overflow-wrap:anywhere}
.pt-turns{margin:0;padding-left:24px;list-style:decimal}
.pt-turns li{margin-bottom:9px}
.pt-turns li::marker{color:var(--pt-faint);font-size:12px}
.pt-episodes pre{margin:0 0 3px;white-space:pre-wrap;overflow-wrap:anywhere;background:none;color:var(--pt-ink)}
.pt-action{font-weight:600!important}
.pt-observation{background:var(--pt-tint)!important;border-radius:5px;padding:4px 9px;max-height:220px;overflow:auto}
.pt-observation.error{border-left:3px solid var(--pt-bad)}
/* few columns and a long text behind them: on a phone the text has a line of its own */
@media (max-width:600px){
.pt-panel tr:has(>td.text:nth-child(n+3):nth-child(-n+4):last-child){display:flex;flex-wrap:wrap;
border-bottom:1px solid var(--pt-line)}
.pt-panel tr>td.text:nth-child(n+3):nth-child(-n+4):last-child{flex:1 0 100%;min-width:0;overflow-wrap:anywhere;
padding-top:0}
.pt-panel tr:has(>td.text:nth-child(n+3):nth-child(-n+4):last-child)>td{border-bottom:0}
.pt-panel table:has(tr>td.text:nth-child(n+3):nth-child(-n+4):last-child) thead{display:none}}
@media (max-width:900px){.pt-charts,.pt-charts.even,.pt-episodes{grid-template-columns:1fr}.pt-time{margin-left:0}}
@media (max-width:700px){.pt-page{padding:8px 10px}.pt-tabs button{padding:6px 9px}
#pt-controls>.form{display:grid!important;grid-template-columns:1fr 1fr;width:100%}
#pt-controls>.form>*{min-width:0!important;padding:6px 10px!important}
.pt-tiles{grid-template-columns:1fr 1fr}
.pt-panel th,.pt-panel td{padding:6px 8px}
.pt-panel th:first-child,.pt-panel td:first-child{position:sticky;left:0;background:var(--pt-card);z-index:1}
.pt-panel td.text{min-width:480px}.pt-panel td .pt-bar{display:none}
.pt-question{flex-direction:column}}
"""


_THEME_SCRIPT = (  # before anything is drawn; Gradio looks at the same two
    "<script>{const t = new URLSearchParams(location.search).get('__theme');"
    "document.documentElement.classList.toggle('dark', t ? t === 'dark' :"
    " matchMedia('(prefers-color-scheme: dark)').matches);}</script>"
)
_TAB_BUTTONS = "".join(
    f'<button role="tab" data-tab="{name}" aria-selected="false">{name.capitalize()}</button>'
    for name in TAB_NAMES
)
_TAB_PANELS = "".join(
    f'<div class="pt-panel" role="tabpanel" data-tab="{name}"></div>' for name in TAB_NAMES
)
_HTML_BEFORE_CONTROLS = '<div class="pt-page"><div class="pt-header"></div><div id="pt-place">'
_HTML_AFTER_CONTROLS = f'</div><nav class="pt-tabs" role="tablist">{_TAB_BUTTONS}</nav>{_TAB_PANELS}</div>{PAGE_SCRIPT}'
_HEAD_TAG, _APP_START_TAG, _APP_END_TAG = "<head>", "<gradio-app", "</gradio-app>"


class PageDocumentMiddleware:
    """Middleware that puts header, tabs, panels and their script into Gradio's document; plain ASGI.

    Nothing is compressed: over loopback that costs more than it saves.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            scope["headers"] = [item for item in scope["headers"] if item[0] != b"accept-encoding"]
            if scope["path"] == "/":
                send = _DocumentSender(send)
        await self.app(scope, receive, send)


class _DocumentSender:
    """Sender of a response that puts the page into its document, once that is whole."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._start: dict[str, Any] = {}
        self._body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_document()
        else:
            await self._send(message)

    async def _send_document(self) -> None:
        headers = self._start["headers"]
        if (
            any(
                name == b"content-type" and value.startswith(b"text/html")
                for name, value in headers
            )
            and self._body
        ):
            self._body = _insert_page(self._body.decode()).encode()
            headers = [item for item in headers if item[0] != b"content-length"]
            headers.append((b"content-length", str(len(self._body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._body})


def _insert_page(document: str) -> str:
    """Gradio's document with the page around its element; another document as it is."""
    if _APP_START_TAG not in document:
        return document
    head, _, rest = document.partition(_HEAD_TAG)
    before, start, rest = rest.partition(_APP_START_TAG)
    element, end, after = rest.partition(_APP_END_TAG)
    return f"{head}{_HEAD_TAG}{_THEME_SCRIPT}<style>{STYLE_SHEET}</style>{before}{_HTML_BEFORE_CONTROLS}{start}{element}{end}{_HTML_AFTER_CONTROLS}{after}"
