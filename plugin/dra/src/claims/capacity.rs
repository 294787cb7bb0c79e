//! Limits, from what the scheduler counts: never from what was asked for.

use tessera_cluster::resource::DeviceResult;
use tessera_model::printable;
use tessera_model::quantity::Quantity;

use super::fault::Fault;
use crate::names;

/// Thousandths of a GPU in one unit of the capacity `cores`.
const MILLIS: u64 = 10;
/// All of a GPU's time.
const WHOLE: u64 = 1000;
/// Most bytes of a malformed value that an error quotes.
const LONGEST: usize = 64;

/// What a result stands for on its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) memory_bytes: u64,
    pub(super) cores_millis: u32,
}

/// The limits of one result.
pub(super) fn limits(result: &DeviceResult) -> Result<Limits, Fault> {
    let memory = amount(result, names::MEMORY)?;
    let memory_bytes = memory.units().map_err(|why| bad(result, names::MEMORY, &why))?;
    let cores = amount(result, names::CORES)?;
    let thousandths = cores.millis().map_err(|why| bad(result, names::CORES, &why))?;
    // Hundredths of a GPU are the unit, so these are hundred-thousandths.
    let cores_millis = thousandths.div_ceil(1000 / MILLIS);
    if memory_bytes == 0 {
        return Err(bad(result, names::MEMORY, &"a share needs some memory"));
    }
    match u32::try_from(cores_millis) {
        Ok(millis) if (1..=WHOLE).contains(&cores_millis) => {
            Ok(Limits { memory_bytes, cores_millis: millis })
        }
        _ => Err(bad(result, names::CORES, &"a GPU's time is shared in parts of 1 to 100")),
    }
}

fn amount(result: &DeviceResult, name: &'static str) -> Result<Quantity, Fault> {
    let value = result.consumed_capacity.get(name);
    let value = value.ok_or_else(|| Fault::NotDivided { result: result.into(), name })?;
    Quantity::parse(value).map_err(|why| bad(result, name, &why))
}

fn bad(result: &DeviceResult, name: &'static str, why: &dyn std::fmt::Display) -> Fault {
    let value = result.consumed_capacity.get(name).map(String::as_str).unwrap_or_default();
    let value = printable::brief(value, LONGEST).into_owned();
    Fault::Capacity { result: result.into(), name, value, why: why.to_string() }
}
