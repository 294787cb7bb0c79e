//! `metrics.listen`: one address, or all addresses with a port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde_json::{Value, json};

use super::pattern;

/// The port by default: that of OpenTelemetry's exporters for Prometheus. The plugin's pod has a network
/// of its own, so it is free there.
pub const DEFAULT_PORT: u16 = 9464;

/// IPv6's unspecified address takes IPv4 too; a kernel without IPv6 refuses it.
pub(super) fn everywhere(port: u16) -> Vec<SocketAddr> {
    [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)]
        .map(|ip| SocketAddr::new(ip, port))
        .to_vec()
}

/// `:9464`, `127.0.0.1:9464`, `[::1]:9464` (port 0: any that is free, which the log tells), or nothing for
/// off.
///
/// # Errors
/// What is wrong and what to do.
pub fn parse(text: &str) -> Result<Vec<SocketAddr>, String> {
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    if text.is_empty() {
        return Ok(Vec::new());
    }
    if let Some(port) = text.strip_prefix(':').and_then(port) {
        return Ok(everywhere(port));
    }
    match text.parse::<SocketAddr>() {
        Ok(address) => Ok(vec![address]),
        Err(_) => Err(format!(
            "\"{text}\" is not an address; write \":{DEFAULT_PORT}\" for every interface, \
             \"127.0.0.1:{DEFAULT_PORT}\" or \"[::1]:{DEFAULT_PORT}\" for one, or \"\" for none"
        )),
    }
}

/// As it is written: two unspecified addresses stand for every interface.
pub(super) fn show(addresses: &[SocketAddr]) -> String {
    match addresses {
        [] => String::new(),
        [one] => one.to_string(),
        [first, ..] => format!(":{}", first.port()),
    }
}

/// What [`parse`] takes; of an address of IPv6 its letters alone.
pub(super) fn schema() -> Value {
    let port = pattern::range(1, 65535);
    let byte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    let address = format!(r"({byte}(\.{byte}){{3}}|\[[0-9A-Fa-f:.]+(%[0-9]+)?\])");
    json!({ "pattern": format!(r"^$|^:\+?{port}$|^{address}:({port}|0+)$") })
}

#[cfg(test)]
mod tests {
    use crate::Metrics;

    #[test]
    fn an_address_is_a_port_or_both_or_nothing() {
        let parse = |text: &str| super::parse(text).unwrap();
        assert_eq!(parse(":9464"), Metrics::default().listen);
        assert_eq!(parse(":1"), ["[::]:1".parse().unwrap(), "0.0.0.0:1".parse().unwrap()]);
        assert_eq!(parse("127.0.0.1:80"), ["127.0.0.1:80".parse().unwrap()]);
        assert_eq!(parse("[::1]:80"), ["[::1]:80".parse().unwrap()]);
        assert_eq!(parse(""), []);
        for bad in [":", ":0", ":65536", "9464", "localhost:80", "::1:80", ":x"] {
            assert!(super::parse(bad).unwrap_err().contains("is not an address"), "{bad}");
        }
    }
}
