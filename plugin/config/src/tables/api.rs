//! `[api]`: the JSON API and the page.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::form::{optional_path, parsed, word};
use crate::parse::Checks;
use crate::table::table;
use crate::{ApiAuthorisation, Config, listen};

/// The port by default: beside that of `/metrics`.
const PORT: u16 = 9481;

table! {
    /// The JSON API and the page of this node.
    pub struct Api {
        /// Address of the [JSON API](api.md) and the page: all interfaces, one, or none. Root's socket is
        /// served in any case.
        listen: Vec<SocketAddr> = vec![SocketAddr::from(([127, 0, 0, 1], PORT))],
            parsed(listen::parse, |all| listen::show(all), "`:PORT`, `IP:PORT`, or empty", listen::schema), Restart;
        /// What a caller over the network must show. `kubernetes`: a token, over TLS; its user's rights on pods
        /// decide what is shown. `none`: nothing, on a loopback address alone. `auto`: `kubernetes` where the
        /// plugin's pod has a service account's token, else `none`.
        authorisation: ApiAuthorisation = ApiAuthorisation::Auto, word(), Restart;
        /// PEM file of the server's certificate, read again when it changes. Empty: a certificate of the
        /// plugin's own.
        tls_cert: Option<PathBuf> = None, optional_path(), Restart;
        /// PEM file of its key.
        tls_key: Option<PathBuf> = None, optional_path(), Restart;
    }
}

/// What must hold between the keys.
pub(crate) fn check_api(config: &Config, checks: &mut Checks<'_>) {
    let Api { listen, authorisation, tls_cert, tls_key } = &config.api;
    let is_open = listen.iter().any(|address| !address.ip().is_loopback());
    if *authorisation == ApiAuthorisation::None
        && is_open
        && checks.are_sound(&["api.listen", "api.authorisation"])
    {
        let text = "everybody in the network could read everything: write \"127.0.0.1:9481\", or set \
                    api.authorisation to \"kubernetes\"";
        checks.problem("api.listen", text);
    }
    if tls_cert.is_some() != tls_key.is_some() && checks.are_sound(&["api.tls_cert", "api.tls_key"])
    {
        let (has, lacks) = match tls_cert {
            Some(_) => ("api.tls_cert", "api.tls_key"),
            None => ("api.tls_key", "api.tls_cert"),
        };
        checks
            .problem(has, &format!("set {lacks} too: a certificate is of no use without its key"));
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn what_needs_no_token_is_on_loopback_alone_and_a_certificate_has_its_key() {
        let problem = |text: &str| {
            let parsed = Config::parse(&format!("[api]\n{text}"));
            parsed
                .err()
                .map(|error| (error.problems[0].key.clone(), error.problems[0].message.clone()))
        };
        for good in [
            "authorisation = \"none\"",
            "authorisation = \"none\"\nlisten = \"[::1]:80\"",
            "authorisation = \"none\"\nlisten = \"\"",
            "listen = \":80\"",
            "tls_cert = \"/a\"\ntls_key = \"/b\"",
        ] {
            assert_eq!(problem(good), None, "{good}");
        }
        let (key, text) = problem("authorisation = \"none\"\nlisten = \":80\"").unwrap();
        assert!(key == "api.listen" && text.contains("127.0.0.1:9481"), "{key}: {text}");
        let (key, text) = problem("tls_key = \"/b\"").unwrap();
        assert!(key == "api.tls_key" && text.contains("set api.tls_cert"), "{key}: {text}");
    }
}
