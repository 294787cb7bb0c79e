//! Where a plugin says that it listens.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::sleep;

/// Of the lines that say so: with the filter `tessera_api::metrics=info`, and with `tessera_web=info`.
pub const METRICS: &str = "serving metrics and probes";
/// See above.
pub const API: &str = "serving the JSON API and the page";

/// The address in the line with this text, as soon as the log has it.
///
/// # Errors
/// It has none: the log is in the message.
pub async fn address(log: impl Fn() -> String, text: &str) -> anyhow::Result<SocketAddr> {
    for _ in 0..100 {
        if let Some(address) = in_text(&log(), text) {
            return Ok(address);
        }
        sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("the plugin's log does not say \u{201c}{text}\u{201d}:\n{}", log())
}

fn in_text(log: &str, text: &str) -> Option<SocketAddr> {
    let line = log.lines().find(|line| line.contains(text))?;
    line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_listener_has_its_own_line() {
        let log = "INFO tessera_web: serving the JSON API and the page address=127.0.0.1:1 tls=true\n\
                   INFO tessera_api: serving metrics and probes address=127.0.0.1:2\n";
        let port = |text| in_text(log, text).map(|address| address.port());
        assert_eq!((port(API), port(METRICS), port("another")), (Some(1), Some(2), None));
    }
}
