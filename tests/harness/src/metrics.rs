//! An HTTP client that sends what it is given, right or wrong.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::exposition::Exposition;
use crate::plugin::{TestNode, bounded, until, until_async};

/// Settings with metrics at a port of their own, beside those of the test.
pub fn settings(rest: &str) -> String {
    format!("[metrics]\nlisten = \"127.0.0.1:0\"\n{rest}")
}

/// Where the plugin's metrics are.
pub async fn address(node: &TestNode) -> SocketAddr {
    until(|| node.sources().metrics.get().copied()).await
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Status line and headers.
    pub head: String,
    /// What follows them.
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }
}

/// Sends these bytes and reads until the other side closes; `None` if that said nothing.
pub async fn say(address: SocketAddr, bytes: &[u8]) -> Option<Answer> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // It may close before it has heard everything.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = bounded(stream.read_to_end(&mut answer)).await;
    let text = String::from_utf8(answer).unwrap();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().unwrap();
    Some(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

/// One request on a connection of its own.
pub async fn request(address: SocketAddr, method: &str, path: &str) -> Answer {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
    say(address, request.as_bytes()).await.expect("an answer")
}

pub async fn get(address: SocketAddr, path: &str) -> Answer {
    request(address, "GET", path).await
}

/// The metrics now, once the last text has grown old.
pub async fn scrape(address: SocketAddr) -> Exposition {
    let answer = get(address, "/metrics").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    Exposition::parse(&answer.body)
}

/// Scrapes until there is something to find.
pub async fn scrape_until<T>(
    address: SocketAddr,
    mut look: impl FnMut(&Exposition) -> Option<T>,
) -> T {
    until_async(async || {
        let found = look(&scrape(address).await);
        if found.is_none() {
            tokio::time::sleep(std::time::Duration::from_millis(180)).await;
        }
        found
    })
    .await
}
