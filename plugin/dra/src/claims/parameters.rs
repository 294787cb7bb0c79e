//! The driver's opaque parameters: `gpu.tessera.dev/v1`, kind `ShareConfig`.

use serde::Deserialize;
use serde_json::Value;
use tessera_cluster::k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use tessera_model::origin::base_request;
use tessera_model::printable;
use tessera_model::sharing::Compute;

use crate::names;

/// Most bytes of what is said of malformed ones, which quotes them.
const LONGEST: usize = 160;

/// Parameters that make no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "parameters of the {}, status.allocation.devices.config[{index}].opaque.parameters: {why}",
    if *.from_class { "DeviceClass" } else { "claim" }
)]
pub struct ParameterError {
    /// Their place in the allocation.
    pub index: usize,
    /// Whether a DeviceClass has them; otherwise the claim.
    pub from_class: bool,
    /// What is wrong.
    pub why: String,
}

/// What parameters say of a request's share of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// Those of its DeviceClass.
    pub class: Option<Compute>,
    /// Those of the claim.
    pub claim: Option<Compute>,
}

/// A claim that asks for a looser limit than it is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Looser {
    /// What the claim says.
    pub asked: Compute,
    /// What its class or its node says.
    pub granted: Compute,
    /// Whether its class says so; otherwise the node.
    pub by_class: bool,
}

impl Said {
    /// The limit on a node that says `node` of its GPU. Who grants a limit, by class or node, may loosen it; a claim's
    /// author may only make it stricter.
    ///
    /// # Errors
    /// The claim is looser than its class, or than the node where its class does not say.
    pub fn effective(self, node: Compute) -> Result<Compute, Looser> {
        let granted = self.class.unwrap_or(node);
        match self.claim {
            Some(asked) if asked < granted => {
                Err(Looser { asked, granted, by_class: self.class.is_some() })
            }
            asked => Ok(asked.unwrap_or(granted)),
        }
    }
}

/// What parameters say of a request. Of one source, later ones take precedence.
pub(super) fn compute(
    config: &[DeviceAllocationConfiguration],
    request: &str,
) -> Result<Said, ParameterError> {
    let mut said = Said::default();
    for (index, config) in config.iter().enumerate() {
        let ours = config.opaque.as_ref().filter(|opaque| opaque.driver == names::DRIVER);
        let Some(opaque) = ours.filter(|_| is_for(config, request)) else { continue };
        let from_class = config.source == "FromClass";
        let read = read(&opaque.parameters.0);
        let read = read.map_err(|why| ParameterError { index, from_class, why })?;
        let of_source = if from_class { &mut said.class } else { &mut said.claim };
        *of_source = read.or(*of_source);
    }
    Ok(said)
}

/// Whether it is for this request, `request` or `request/alternative`: a request's name stands for its alternatives too.
pub(super) fn is_for(config: &DeviceAllocationConfiguration, request: &str) -> bool {
    let named = config.requests.as_deref().unwrap_or_default();
    named.is_empty() || named.iter().any(|name| name == request || name == base_request(request))
}

/// `gpu.tessera.dev/v1`, `ShareConfig`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ShareConfig {
    api_version: String,
    kind: String,
    compute: Option<Compute>,
}

fn read(parameters: &Value) -> Result<Option<Compute>, String> {
    let read = ShareConfig::deserialize(parameters);
    let brief =
        |error: serde_json::Error| printable::brief(&error.to_string(), LONGEST).into_owned();
    let ShareConfig { api_version, kind, compute } = read.map_err(brief)?;
    if (api_version.as_str(), kind.as_str()) == (names::PARAMETERS_VERSION, names::PARAMETERS_KIND)
    {
        return Ok(compute);
    }
    let found = format!("{api_version} {kind}");
    Err(format!(
        "{} is not {} {}",
        printable::brief(&found, LONGEST),
        names::PARAMETERS_VERSION,
        names::PARAMETERS_KIND
    ))
}
