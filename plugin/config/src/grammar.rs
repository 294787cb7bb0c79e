//! Strings with a grammar of their own: addresses, the log's filter, names that others define; and regular expressions for
//! the schema, in the syntax that ECMA 262 and Go's RE2 share.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde_json::{Value, json};
use tracing_subscriber::filter::{LevelFilter, Targets};

use crate::form::{Leaf, parsed};

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
pub fn addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
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
pub(super) fn show_addresses(addresses: &[SocketAddr]) -> String {
    match addresses {
        [] => String::new(),
        [one] => one.to_string(),
        [first, ..] => format!(":{}", first.port()),
    }
}

/// What [`addresses`] takes; of an address of IPv6 its letters alone.
pub(super) fn addresses_schema() -> Value {
    let port = range(1, 65535);
    let byte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    let address = format!(r"({byte}(\.{byte}){{3}}|\[[0-9A-Fa-f:.]+(%[0-9]+)?\])");
    json!({ "pattern": format!(r"^$|^:\+?{port}$|^{address}:({port}|0+)$") })
}

/// Most bytes of a filter: each of its words is compared with all others.
pub(super) const LONGEST_FILTER: usize = 4096;

/// Reads `info,tessera_arbiter=debug` and the like. Without a level of all nothing else is logged.
/// Errors: a text that is too long, a word that names no level, a module without a name. `Targets` alone takes such a
/// word for a module's name: after a misspelt `info` no error would be logged ever again.
pub fn log_filter(text: &str) -> Result<Targets, String> {
    if text.len() > LONGEST_FILTER {
        return Err(format!("is longer than {LONGEST_FILTER} bytes: name fewer modules"));
    }
    let mut targets = Targets::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let (module, level) = match word.split_once('=') {
            Some((module, level)) => (Some(module.trim()), level.trim()),
            None => (None, word),
        };
        let read = level.parse::<LevelFilter>().ok().filter(|_| !level.is_empty());
        let Some(level) = read.filter(|_| module != Some("")) else {
            return Err(format!(
                "not a filter: `{word}` is neither a level (off, error, warn, info, debug, trace) nor a \
                 module's, as in `info,tessera_arbiter=debug`"
            ));
        };
        targets = match module {
            Some(module) => targets.with_target(module, level),
            None => targets.with_default(level),
        };
    }
    Ok(targets)
}

/// What [`log_filter`] takes, as a regular expression.
pub(super) fn filter_pattern() -> String {
    let levels = ["off", "error", "warn", "info", "debug", "trace"].map(|level| {
        let either = |c: char| format!("[{}{c}]", c.to_ascii_uppercase());
        level.chars().map(either).collect::<String>()
    });
    let level = format!(r"({}|\+?0*[0-5])", levels.join("|"));
    let word = format!(r"\s*(([^,=]*[^,=\s][^,=]*=\s*)?{level}\s*)?");
    format!("^{word}(,{word})*$")
}

pub(super) fn any_name() -> Leaf<String> {
    parsed(|text| Ok(text.to_owned()), String::clone, "string", || json!({}))
}

/// What a GPU may be called: anything but nothing.
pub(super) fn gpu_name() -> Leaf<String> {
    parsed(not_empty, String::clone, "string", || json!({ "minLength": 1 }))
}

fn not_empty(text: &str) -> Result<String, String> {
    let message = || "an empty name matches no GPU; remove it".to_owned();
    Some(text.to_owned()).filter(|text| !text.is_empty()).ok_or_else(message)
}

pub(super) fn resource_name(accepts: &str) -> Leaf<String> {
    parsed(
        |text| check_resource(text).map(|()| text.to_owned()),
        String::clone,
        accepts,
        resource_schema,
    )
}

/// An extended resource's name: a DNS subdomain, a slash, a name of at most 63 characters; not
/// under `kubernetes.io`. See "Extended resources" in the Kubernetes documentation.
pub(super) fn check_resource(name: &str) -> Result<(), String> {
    let hint = "; write it like \"tessera.dev/gpu\"";
    let Some((domain, leaf)) = name.split_once('/') else {
        return Err(format!("\"{name}\" has no domain{hint}"));
    };
    let label = |text: &str, extra: &[u8]| {
        let bytes = text.as_bytes();
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        bytes.len() <= 63
            && edge(bytes.first())
            && edge(bytes.last())
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || extra.contains(b))
    };
    let lower = !domain.bytes().any(|byte| byte.is_ascii_uppercase());
    // `requests.` and the domain together name a quota, which must still be a valid name.
    if domain.len() > 244 || !lower || !domain.split('.').all(|part| label(part, b"-")) {
        return Err(format!("\"{domain}\" is not a DNS name in lower case{hint}"));
    }
    if !label(leaf, b"-_.") {
        return Err(format!("\"{leaf}\" is not a resource name of at most 63 characters{hint}"));
    }
    if domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") {
        return Err(format!("kubernetes.io belongs to Kubernetes{hint}"));
    }
    Ok(())
}

/// What [`check_resource`] takes.
fn resource_schema() -> Value {
    let label = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?";
    let leaf = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?";
    json!({
        "pattern": format!(r"^{label}(\.{label})*/{leaf}$"),
        "not": { "pattern": r"^([^/]*\.)?kubernetes\.io/|^[^/]{245}" },
    })
}

pub(super) const NUMBER: &str = r"([0-9]+\.?[0-9]*|\.[0-9]+)";
/// One that is not 0.
pub(super) const POSITIVE: &str = r"([0-9]*[1-9][0-9]*\.?[0-9]*|[0-9]*\.[0-9]*[1-9][0-9]*)";
/// A fraction less than 1 that is not 0.
const SMALL: &str = r"0*\.[0-9]*[1-9][0-9]*";
/// The suffix of a quantity of bytes, or none.
pub(super) const SUFFIX: &str = "([KMGTPE]iB?|[numkMGTPE]|[eE][+-]?[0-9]+)?";

pub(super) fn whole(pattern: &str) -> String {
    format!("^({pattern})$")
}

/// A whole number from `least` (not 0) to `most`, with or without zeros before it.
pub(super) fn range(least: u64, most: u64) -> String {
    let mut parts = Vec::new();
    let mut from = least;
    while from <= most {
        // The last digits run from zeros to nines.
        let mut step = 1;
        while from.is_multiple_of(step * 10) && from + step * 10 - 1 <= most {
            step *= 10;
        }
        let digit = from / step % 10;
        let more = (9 - digit).min((most - (from + step - 1)) / step);
        let head = Some(from / step / 10).filter(|head| *head > 0).map(|head| head.to_string());
        let class = match more {
            0 => digit.to_string(),
            _ => format!("[{digit}-{}]", digit + more),
        };
        let tail = "[0-9]".repeat(step.ilog10() as usize);
        parts.push(head.unwrap_or_default() + &class + &tail);
        from += step * (more + 1);
    }
    format!("0*({})", parts.join("|"))
}

/// A decimal number of more than 0 and at most `most`.
fn up_to(most: u64) -> String {
    let below = match most {
        1 => String::new(),
        _ => format!(r"|{}(\.[0-9]*)?", range(1, most - 1)),
    };
    format!(r"({SMALL}|0*{most}(\.0*)?{below})")
}

/// A quantity of more than 0 and at most `most`. What a suffix other than `m` makes of a number is not
/// looked at, but for whole numbers of thousands and more.
pub(super) fn part(most: u64) -> String {
    let (plain, milli) = (up_to(most), up_to(most * 1000));
    format!(r"\+?({plain}|{milli}m|{SMALL}([KMGTPE]i|[kMGTPE])|{POSITIVE}([nu]|[eE][+-]?[0-9]+))")
}

/// A percentage of more than 0 and at most 100.
pub(super) fn percent() -> String {
    format!(r"{}\s*%+", part(100))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Metrics;

    #[test]
    fn an_address_is_a_port_or_both_or_nothing() {
        let parse = |text: &str| addresses(text).unwrap();
        assert_eq!(parse(":9464"), Metrics::default().listen);
        assert_eq!(parse(":1"), ["[::]:1".parse().unwrap(), "0.0.0.0:1".parse().unwrap()]);
        assert_eq!(parse("127.0.0.1:80"), ["127.0.0.1:80".parse().unwrap()]);
        assert_eq!(parse("[::1]:80"), ["[::1]:80".parse().unwrap()]);
        assert_eq!(parse(""), []);
        for bad in [":", ":0", ":65536", "9464", "localhost:80", "::1:80", ":x"] {
            assert!(addresses(bad).unwrap_err().contains("is not an address"), "{bad}");
        }
    }

    #[test]
    fn levels_are_of_all_and_of_modules() {
        let targets = log_filter("warn, tessera_api::metrics=debug,h2=off").expect("a filter");
        let would = |module: &str, level| targets.would_enable(module, &level);
        assert!(would("tokio", tracing::Level::WARN) && !would("tokio", tracing::Level::INFO));
        assert!(would("tessera_api::metrics::server", tracing::Level::DEBUG));
        assert!(!would("h2::codec", tracing::Level::ERROR));
        assert!(
            log_filter("off")
                .is_ok_and(|targets| targets.default_level() == Some(LevelFilter::OFF))
        );
    }

    #[test]
    fn a_misspelt_level_is_no_modules_name() {
        for text in ["inof", "tessera=loud", "info,=", "info,=debug", "x=", "info,debgu"] {
            let error = log_filter(text).expect_err(text);
            assert!(error.contains("neither a level (off, error, warn"), "{error}");
        }
    }
}
