//! The page's files, in the binary.

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use sha2::{Digest, Sha256};

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

/// A file of the page.
pub(crate) struct File {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

const INDEX: File =
    File { name: "index.html", kind: HTML, bytes: include_bytes!("../assets/index.html") };

macro_rules! file {
    ($name:literal, $kind:expr) => {
        File { name: $name, kind: $kind, bytes: include_bytes!(concat!("../assets/", $name)) }
    };
}

/// What `/assets/NAME` serves. A new file needs a line here; a test of this module finds a missing one.
const ASSETS: &[File] = &[
    file!("api.js", SCRIPT),
    file!("app.js", SCRIPT),
    file!("bars.js", SCRIPT),
    file!("chart.js", SCRIPT),
    file!("dialogs.js", SCRIPT),
    file!("dom.js", SCRIPT),
    file!("facts.js", SCRIPT),
    file!("fleet.js", SCRIPT),
    file!("format.js", SCRIPT),
    file!("gpu.js", SCRIPT),
    file!("history.js", SCRIPT),
    file!("icon.svg", IMAGE),
    file!("model.js", SCRIPT),
    file!("namespaces.js", SCRIPT),
    file!("pod.js", SCRIPT),
    file!("router.js", SCRIPT),
    file!("stream.js", SCRIPT),
    file!("style.css", STYLE),
    file!("trace.js", SCRIPT),
];

/// The page itself.
pub(crate) fn index(headers: &HeaderMap) -> Response<Body> {
    INDEX.response(headers)
}

/// One of its files; `None` where there is none of that name.
pub(crate) fn asset(name: &str, headers: &HeaderMap) -> Option<Response<Body>> {
    ASSETS.iter().find(|file| file.name == name).map(|file| file.response(headers))
}

impl File {
    /// Always asked for again, and sent only where it is another: a browser must not mix files of two versions.
    fn response(&self, headers: &HeaderMap) -> Response<Body> {
        let tag = tag(self.bytes);
        let known =
            headers.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
        let body = if known { Body::empty() } else { Body::from(self.bytes) };
        let mut response = Response::new(body);
        if known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.kind));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        if let Ok(tag) = HeaderValue::try_from(tag) {
            headers.insert(ETAG, tag);
        }
        response
    }
}

fn tag(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut tag = "\"".to_owned();
    for byte in &Sha256::digest(bytes)[..16] {
        let _ = write!(tag, "{byte:02x}");
    }
    tag.push('"');
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_page_is_served() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let mut there: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != INDEX.name)
            .collect();
        there.sort();
        let mut served: Vec<&str> = ASSETS.iter().map(|file| file.name).collect();
        served.sort_unstable();
        assert_eq!(there, served);
    }
}
