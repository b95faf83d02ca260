// Browsers start no Worker from file: addresses, and the search is one. There a
// hidden frame runs its script, so that the site can be read without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.addEventListener("load", () => this.start(frame.contentWindow, url));
      frame.srcdoc = "<!doctype html><title></title>";
      document.body.append(frame);
    }

    start(scope, url) {
      const answer = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      scope.postMessage = (data) => setTimeout(answer, 0, data);
      const script = scope.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.send = (data) =>
          scope.dispatchEvent(new scope.MessageEvent("message", { data }));
        this.waiting.forEach(this.send);
      };
      scope.document.head.append(script);
    }

    postMessage(data) {
      if (this.send) this.send(data);
      else this.waiting.push(data);
    }
  };
}
