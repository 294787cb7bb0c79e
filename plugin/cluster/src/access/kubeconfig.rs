//! What kubeconfig files say.

use std::path::PathBuf;

use kube::Config;
use kube::config::{Context, KubeConfigOptions, Kubeconfig};
use tokio::runtime::Handle;

use super::useful;
use crate::client::chain;

/// The files, as `KUBECONFIG` names them.
pub(crate) fn names(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(":")
}

/// What the files say together, as kubectl merges them.
pub(crate) fn merged(files: &[PathBuf]) -> Result<Kubeconfig, String> {
    let mut whole = Kubeconfig::default();
    for file in files {
        // The reader of YAML shows the lines around the fault, in which tokens may stand.
        let at = |error: &dyn std::fmt::Display| {
            let said = error.to_string();
            format!("{}: {}", file.display(), said.lines().next().unwrap_or_default())
        };
        let one = Kubeconfig::read_from(file).map_err(|error| at(&error))?;
        whole = whole.merge(one).map_err(|error| at(&error))?;
    }
    Ok(whole)
}

/// The context that was asked for, or else the current one.
///
/// # Errors
/// There is none.
pub(crate) fn in_use<'a>(
    whole: &'a Kubeconfig,
    asked: Option<&'a str>,
) -> Result<(&'a str, &'a Context), String> {
    let current = whole.current_context.as_deref().filter(|name| !name.is_empty());
    let Some(name) = asked.or(current) else {
        return Err(
            "current-context: the kubeconfig has no current context: name one with --context"
                .to_owned(),
        );
    };
    let named = whole.contexts.iter().find(|context| context.name == name);
    let Some(context) = named.and_then(|named| named.context.as_ref()) else {
        let names: Vec<&str> = whole.contexts.iter().map(|one| one.name.as_str()).collect();
        return Err(format!(
            "contexts: the kubeconfig has no context \"{name}\"; it has {}",
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        ));
    };
    Ok((name, context))
}

/// What `kube` needs to connect. Blocking, on a thread of a runtime: reads files.
///
/// # Errors
/// What is wrong, as `kube` says it.
pub(super) fn read(files: &[PathBuf], context: Option<&str>) -> Result<Config, String> {
    let whole = merged(files)?;
    config(whole, context).map_err(|error| format!("{}: {error}", names(files)))
}

fn config(whole: Kubeconfig, context: Option<&str>) -> Result<Config, String> {
    let (name, used) = in_use(&whole, context)?;
    let user = used.user.clone().unwrap_or_default();
    // kubectl refuses that, and `kube` would go on as nobody.
    if !user.is_empty() && !whole.auth_infos.iter().any(|one| one.name == user) {
        return Err(format!(
            "context {name:?} names the user {user:?}, which is not there: correct the name, or add the user"
        ));
    }
    let asked = context.map(str::to_owned);
    let options = KubeConfigOptions { context: asked, ..KubeConfigOptions::default() };
    let config = Handle::current().block_on(Config::from_custom_kubeconfig(whole, &options));
    let mut config = config.map_err(|error| chain(&error))?;
    let url = &config.cluster_url;
    // `kube` ends the process by a panic on others.
    if !matches!(url.scheme_str(), Some("http" | "https")) || url.host().is_none_or(str::is_empty) {
        return Err(format!("server: {url} is no address: write https://HOST:PORT"));
    }
    config.root_cert = config.root_cert.map(useful);
    super::take_line_end(&mut config.auth_info).map_err(|why| format!("tokenFile: {why}"))?;
    Ok(config)
}
