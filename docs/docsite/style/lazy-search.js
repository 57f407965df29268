// The theme fetches the index of its search, a megabyte, with every page. Here it waits until somebody opens
// search, or has come from a search whose words the page highlights. Loaded before the theme's own script.
{
  const query = new URLSearchParams(location.search)
  const button = "[data-md-component=search], [for=__search]"
  const asked = new Promise(ask => {
    if (query.has("h") || query.has("search")) ask()
    addEventListener("click", event => event.target.closest?.(button) && ask(), true)
  })
  // Until it has the index, the theme does not hear these keys.
  const press = event => {
    if (event.key !== "k" || !(event.ctrlKey || event.metaKey)) return
    event.preventDefault()
    document.querySelector("[data-md-component=search] button")?.click()
  }
  addEventListener("keydown", press, true)
  asked.then(() => removeEventListener("keydown", press, true))
  const isIndex = address => /\/search\.js(on)?$/.test(address)

  // From a disk it is a script, from a server it is fetched.
  const append = document.head.appendChild
  document.head.appendChild = function (node) {
    if (!isIndex(node.src ?? "")) return append.call(this, node)
    asked.then(() => append.call(this, node))
    return node
  }
  const { open, send } = XMLHttpRequest.prototype
  XMLHttpRequest.prototype.open = function (method, address, ...more) {
    this.waits = isIndex(String(address))
    return open.call(this, method, address, ...more)
  }
  XMLHttpRequest.prototype.send = function (...body) {
    if (!this.waits) return send.apply(this, body)
    asked.then(() => send.apply(this, body))
  }
}
