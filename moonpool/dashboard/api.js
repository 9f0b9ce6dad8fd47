// Calls of the front end that served this page. The API key, if one is needed, lives in this tab only.

const KEY = "moonpool-key";
let key = sessionStorage.getItem(KEY) || "";

export const hasKey = () => key !== "";

export function setKey(text) {
  key = text.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Returns the response; raises ApiError with the server's own sentence.
export async function call(path, body, signal, more = {}) {
  const headers = key ? { Authorization: `Bearer ${key}`, ...more } : more;
  const options = body === undefined ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The front end does not answer.");
  }
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not in the API's format: the status says enough
  }
  throw new ApiError(response.status, message);
}

export const getJson = async (path) => (await call(path)).json();
