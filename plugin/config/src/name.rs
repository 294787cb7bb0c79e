//! Names that others define: resources, GPUs, variables.

use serde_json::{Value, json};

use super::form::{Leaf, parsed};

/// A string of any kind.
pub(super) fn any() -> Leaf<String> {
    parsed(|text| Ok(text.to_owned()), String::clone, "string", || json!({}))
}

/// What a GPU may be called: anything but nothing.
pub(super) fn gpu() -> Leaf<String> {
    parsed(not_empty, String::clone, "string", || json!({ "minLength": 1 }))
}

fn not_empty(text: &str) -> Result<String, String> {
    let message = || "an empty name matches no GPU; remove it".to_owned();
    Some(text.to_owned()).filter(|text| !text.is_empty()).ok_or_else(message)
}

/// An extended resource's name.
pub(super) fn resource(accepts: &str) -> Leaf<String> {
    parsed(|text| check_resource(text).map(|()| text.to_owned()), String::clone, accepts, schema)
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
fn schema() -> Value {
    let label = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?";
    let leaf = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?";
    json!({
        "pattern": format!(r"^{label}(\.{label})*/{leaf}$"),
        "not": { "pattern": r"^([^/]*\.)?kubernetes\.io/|^[^/]{245}" },
    })
}
