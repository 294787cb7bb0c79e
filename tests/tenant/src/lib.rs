//! `tessera-tenant`: a small CUDA client that behaves like a tenant of a shared GPU.
//!
//! It speaks the driver API alone (`dlopen` of `libcuda.so.1`), so it runs on NVIDIA's driver and on the
//! simulated one, with the shim preloaded and without. The demo, the end-to-end pods and the benches are built from it.
//!
//! Everything it reports is one JSON object per line on standard output; people's text goes to
//! standard error. Exit codes are [`exit`]'s.

pub mod args;
pub mod churn;
pub mod cuda;
pub mod driver;
pub mod exit;
pub mod greedy;
pub mod histogram;
pub mod hold;
pub mod infer;
pub mod info;
pub mod load;
pub mod memory;
pub mod processes;
pub mod report;
pub mod serve;
pub mod stop;
pub mod time;

/// One of the devices that the driver shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Ordinal(i32),
    /// By UUID: ordinals depend on `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`.
    Uuid([u8; 16]),
}

impl std::str::FromStr for Device {
    type Err = &'static str;

    /// `1`, or a UUID as NVML prints it.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const NEITHER: &str = "it is neither an ordinal nor a UUID";
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        let text = text.strip_prefix("GPU-").or(text.strip_prefix("MIG-")).unwrap_or(text);
        let hex: Vec<u8> = text.bytes().filter(|b| *b != b'-').collect();
        if hex.len() != 32 {
            return Err(NEITHER);
        }
        let mut uuid = [0; 16];
        for (byte, pair) in uuid.iter_mut().zip(hex.chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| NEITHER)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| NEITHER)?;
        }
        Ok(Self::Uuid(uuid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_ordinal_or_uuid() {
        assert_eq!("1".parse(), Ok(Device::Ordinal(1)));
        let uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f".parse();
        assert_eq!(uuid, Ok(Device::Uuid(std::array::from_fn(|i| u8::try_from(i).unwrap()))));
        assert!("GPU-1".parse::<Device>().is_err());
        assert!("GPU-zz010203-0405-0607-0809-0a0b0c0d0e0f".parse::<Device>().is_err());
    }
}
