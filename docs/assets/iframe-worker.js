// The search of these pages runs in a worker, which a browser refuses to a page that was opened as a file.
// There a hidden frame takes the worker's place: the same script, in a window of its own.
"use strict";

if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.document.open();
      inner.importScripts = (...sources) => this.load(inner, sources);
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.document.write("<!doctype html><html><body></body></html>");
      inner.document.close();
      this.load(inner, [url]).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    async load(inner, sources) {
      for (const source of sources) {
        await new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = reject;
          inner.document.body.append(script);
        });
      }
    }

    postMessage(data) {
      if (this.waiting) {
        this.waiting.push(data);
      } else {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      }
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
