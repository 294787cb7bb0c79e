//! The JSON API and the page of this node.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_agent::kubernetes::node_name;
use tessera_agent::status_board::StatusBoard;
use tessera_api::admin::{StatusView, routes};
use tessera_api::view::NodeSource;
use tessera_cluster::{Client, Server};
use tessera_config::{ApiAuthorisation, Config};
use tessera_web::{Authorisation, Counts, Listener, Options, RootSocket, Tls};
use tracing::warn;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Api {
    /// What is shown, for what is known later in the start: the history.
    pub source: NodeSource,
    _server: Option<tessera_web::Server>,
}

pub(crate) fn bind(path: &Path) -> anyhow::Result<RootSocket> {
    RootSocket::bind(path).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => anyhow::anyhow!(
            "another Tessera plugin answers at {}; stop it, or give each its own paths.admin, paths.ledger and \
             paths.pages",
            path.display()
        ),
        _ => anyhow::anyhow!("paths.admin {}: {error}", path.display()),
    })
}

/// Serves root alone, for a plugin that stands by.
pub(crate) fn serve_root(socket: RootSocket, view: Arc<StatusView>) -> Option<tessera_web::Server> {
    let source = NodeSource::new(node_name().unwrap_or_default(), Arc::clone(&view));
    let mut options = Options::new(Arc::new(source));
    options.socket = Some(socket);
    options.root = routes(view);
    tessera_web::Server::start(options).ok()
}

/// Serves it. That it cannot be served is no reason not to serve kubelet. Call it within the runtime that serves
/// kubelet.
pub(crate) fn start(
    config: &Config,
    socket: RootSocket,
    cluster: Option<Server>,
    view: &Arc<StatusView>,
    board: &Arc<StatusBoard>,
) -> Api {
    let source = NodeSource::new(node_name().unwrap_or_default(), Arc::clone(view));
    let mut options = Options::new(Arc::new(source.clone()));
    options.socket = Some(socket);
    options.root = routes(Arc::clone(view));
    let published = Arc::clone(board);
    options.report = Arc::new(move |listener, problem| {
        let topic = match listener {
            Listener::Network => "api",
            Listener::Socket => "admin socket",
        };
        published.set_condition(topic, problem);
    });
    if !config.api.listen.is_empty() {
        options.counts.expect_listener();
    }
    let _ = view.api.set(Arc::clone(&options.counts));
    match protection(config, cluster, &options.counts) {
        Ok((authorisation, tls)) => {
            options.listen.clone_from(&config.api.listen);
            (options.authorisation, options.tls) = (authorisation, tls);
        }
        Err(problem) => board.set_condition("api authorisation", Some(problem)),
    }
    let server = tessera_web::Server::start(options);
    let server = server.inspect_err(|error| {
        warn!(%error, "the JSON API and the page are not served: no thread");
    });
    Api { source, _server: server.ok() }
}

fn protection(
    config: &Config,
    cluster: Option<Server>,
    counts: &Arc<Counts>,
) -> Result<(Authorisation, Tls), String> {
    let api = &config.api;
    let files = api.tls_cert.clone().zip(api.tls_key.clone());
    let files = files.map(|(certificate, key): (PathBuf, PathBuf)| Tls::Files { certificate, key });
    let is_open = api.listen.iter().any(|address| !address.ip().is_loopback());
    let reviews = |server| {
        let tls = files.clone().unwrap_or(Tls::SelfSigned);
        (Authorisation::kubernetes(Client::new(server, LIMIT), Arc::clone(counts)), tls)
    };
    match (api.authorisation, cluster) {
        (ApiAuthorisation::Auto | ApiAuthorisation::Kubernetes, Some(server)) => Ok(reviews(server)),
        (ApiAuthorisation::Kubernetes, None) => Err(
            "the JSON API and the page are not served: api.authorisation is \"kubernetes\", and the plugin's pod has \
             no service account's token; mount one, or set it to \"none\" on a loopback address"
                .to_owned(),
        ),
        (ApiAuthorisation::Auto, None) if is_open => Err(
            "the JSON API and the page are not served: api.listen is no loopback address, and there is no API server \
             to ask for rights; set it to \"127.0.0.1:9481\""
                .to_owned(),
        ),
        (ApiAuthorisation::Auto | ApiAuthorisation::None, _) => {
            Ok((Authorisation::None, files.unwrap_or(Tls::Plain)))
        }
    }
}
