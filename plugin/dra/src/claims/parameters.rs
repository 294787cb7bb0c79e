//! The driver's opaque parameters: `gpu.tessera.dev/v1`, kind `ShareConfig`.

use serde_json::{Map, Value};
use tessera_cluster::k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use tessera_model::origin::base_request;
use tessera_model::printable;
use tessera_model::sharing::Compute;

use crate::names;

/// Most bytes of a malformed value that an error quotes.
const LONGEST: usize = 64;

/// Parameters that make no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "parameters of the {}, status.allocation.devices.config[{index}].opaque.parameters{field}: {why}",
    if *.from_class { "DeviceClass" } else { "claim" }
)]
pub struct ParameterError {
    /// Their place in the allocation.
    pub index: usize,
    /// Whether a DeviceClass has them; otherwise the claim.
    pub from_class: bool,
    /// The field, with its dot; empty for all of it.
    pub field: String,
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
        let read = read.map_err(|(field, why)| ParameterError { index, from_class, field, why })?;
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

/// The field at fault, and why.
type Fault = (String, String);

fn read(parameters: &Value) -> Result<Option<Compute>, Fault> {
    let Value::Object(fields) = parameters else {
        return Err((String::new(), format!("{} is no object", quoted(parameters))));
    };
    is(fields, "apiVersion", names::PARAMETERS_VERSION)?;
    is(fields, "kind", names::PARAMETERS_KIND)?;
    let known = ["apiVersion", "kind", "compute"];
    if let Some(unknown) = fields.keys().find(|field| !known.contains(&field.as_str())) {
        let field = format!(".{}", printable::brief(unknown, LONGEST));
        return Err((field, "there is no such field; there is compute".to_owned()));
    }
    match fields.get("compute") {
        None => Ok(None),
        Some(Value::String(text)) if text == Compute::Burst.name() => Ok(Some(Compute::Burst)),
        Some(Value::String(text)) if text == Compute::Strict.name() => Ok(Some(Compute::Strict)),
        Some(Value::String(text)) if text == Compute::None.name() => Ok(Some(Compute::None)),
        Some(other) => {
            let why = format!("{} is none of burst, strict and none", quoted(other));
            Err((".compute".to_owned(), why))
        }
    }
}

fn is(fields: &Map<String, Value>, name: &str, wanted: &str) -> Result<(), Fault> {
    let why = match fields.get(name) {
        Some(value) if value == wanted => return Ok(()),
        Some(value) => format!("{} is not {wanted}", quoted(value)),
        None => format!("is missing; write {wanted}"),
    };
    Err((format!(".{name}"), why))
}

fn quoted(value: &Value) -> String {
    printable::brief(&value.to_string(), LONGEST).into_owned()
}
