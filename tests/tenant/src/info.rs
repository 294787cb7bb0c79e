//! `info`: what this process sees of its GPUs.

use serde_json::json;

use crate::Target;
use crate::cuda::{self, Cuda};
use crate::exit::Exit;
use crate::nvml;

pub fn run(target: Target) -> Result<(), Exit> {
    let driver = cuda::initialise(target)?;
    let mut devices = Vec::new();
    for ordinal in 0..cuda::device_count(&driver)? {
        let (uuid, name, total) = cuda::describe(&driver, ordinal)?;
        let context = Cuda::on(driver, ordinal)?;
        let (free, mem_total) = context.mem_info()?;
        devices.push(json!({
            "ordinal": ordinal,
            "uuid": uuid,
            "name": name,
            "device_total_mem": total,
            "mem_get_info": { "free": free, "total": mem_total },
            "nvml": nvml::memory(&uuid),
        }));
        context.close()?;
    }
    println!("{:#}", json!({ "driver_version": cuda::version(&driver)?, "devices": devices }));
    Ok(())
}
