//! The driver's opaque parameters: `gpu.tessera.dev/v1`, kind `ShareConfig`.

use serde_json::{Map, Value};
use tessera_cluster::resource::OpaqueConfig;
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

/// What a request's share of time means, if its parameters say. Those of the claim take precedence over those of
/// a class, and later ones over earlier ones.
pub(super) fn compute(
    config: &[OpaqueConfig],
    request: &str,
) -> Result<Option<Compute>, ParameterError> {
    let ours = |(_, config): &(usize, &OpaqueConfig)| {
        config.driver == names::DRIVER && config.is_for(request)
    };
    let mut compute = None;
    for from_class in [true, false] {
        let of_source = config.iter().enumerate().filter(ours);
        for (index, config) in of_source.filter(|(_, config)| config.from_class == from_class) {
            let read = read(&config.parameters).map_err(|(field, why)| ParameterError {
                index,
                from_class,
                field,
                why,
            })?;
            compute = read.or(compute);
        }
    }
    Ok(compute)
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
