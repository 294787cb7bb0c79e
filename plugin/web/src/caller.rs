//! From where a request comes, and what its caller may see.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::http::header::HOST;
use axum::http::{HeaderMap, StatusCode};
use tessera_view::narrow::Rights;

use crate::authorise::{self, Authorisation, Authoriser, Known};
use crate::source::Refusal;

/// From where a request comes: the connection's, in the request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Root's socket, by root.
    Root,
    /// Root's socket, by somebody else.
    Stranger,
    /// TCP.
    Network,
}

/// The process at the other end of root's socket, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its user when it connected.
    pub uid: u32,
    /// Its pid in this pid namespace; 0 where it has none there.
    pub pid: u32,
}

/// A caller that may ask.
#[derive(Clone)]
pub(crate) enum Caller {
    /// May see everything.
    All,
    /// May see what the API server says.
    User(Arc<Authoriser>, Arc<Known>),
}

impl Caller {
    /// The caller of a request.
    pub async fn of(
        origin: Origin,
        headers: &HeaderMap,
        authorisation: &Authorisation,
    ) -> Result<Self, Refusal> {
        match (origin, authorisation) {
            (Origin::Root, _) => Ok(Caller::All),
            (Origin::Stranger, _) => Err(Self::stranger()),
            (Origin::Network, Authorisation::None) => {
                is_local(headers)?;
                Ok(Caller::All)
            }
            (Origin::Network, Authorisation::Kubernetes(authoriser)) => {
                let user = authoriser.user(headers).await?;
                Ok(Caller::User(Arc::clone(authoriser), user))
            }
        }
    }

    /// The refusal of somebody else at root's socket.
    pub fn stranger() -> Refusal {
        Refusal::new(StatusCode::FORBIDDEN, "this socket is for root and the plugin's own user")
    }

    /// What it may see of the namespaces that a question names.
    pub async fn rights_on_named(&self, namespaces: &BTreeSet<String>) -> Result<Rights, Refusal> {
        match self {
            Caller::All => Ok(Rights::All),
            Caller::User(authoriser, user) => authoriser.rights_on_named(user, namespaces).await,
        }
    }

    /// What it may see of the namespaces that have tenants here.
    pub async fn rights_on_found(&self, namespaces: BTreeSet<String>) -> Result<Rights, Refusal> {
        let Caller::User(authoriser, user) = self else { return Ok(Rights::All) };
        match authoriser.rights_on_found(user, namespaces).await? {
            Rights::Namespaces(some) if some.is_empty() => Err(self.refused("")),
            rights => Ok(rights),
        }
    }

    /// The refusal of a namespace that may not be seen, whether or not it is there: an empty answer would say that
    /// nothing is. Where none is named: of all that is there.
    pub fn refused(&self, namespace: &str) -> Refusal {
        authorise::nothing(self.name(), namespace)
    }

    /// Whose share of streams it takes.
    pub fn name(&self) -> &str {
        match self {
            Caller::All => "",
            Caller::User(_, user) => user.name(),
        }
    }
}

/// A page of another site, whose name was made to mean this host, is not to read what needs no token here.
fn is_local(headers: &HeaderMap) -> Result<(), Refusal> {
    let Some(host) = headers.get(HOST) else { return Ok(()) };
    let host = host.to_str().unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let is_local = name.eq_ignore_ascii_case("localhost")
        || name.parse().is_ok_and(|address: std::net::IpAddr| address.to_canonical().is_loopback());
    match is_local {
        true => Ok(()),
        false => Err(Refusal::new(
            StatusCode::MISDIRECTED_REQUEST,
            "without authorisation this answers to localhost and loopback addresses alone: use \
             http://localhost:PORT or http://127.0.0.1:PORT",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn only_this_hosts_own_names_need_no_token() {
        let local = |host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_static(host));
            is_local(&headers).is_ok()
        };
        for host in ["localhost", "localhost:9481", "127.0.0.1:9481", "[::1]:9481", "127.1.2.3"] {
            assert!(local(host), "{host}");
        }
        for host in ["evil.example", "evil.example:9481", "10.0.0.1", "localhost.evil", "", "[::2]"]
        {
            assert!(!local(host), "{host}");
        }
    }
}
