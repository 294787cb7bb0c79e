//! Which front end sells a GPU: exactly one does, by configuration. Pure.

use tessera_config::Config;
use tessera_model::gpu::Gpu;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontEnd {
    DevicePlugin,
    Dra,
}

impl FrontEnd {
    /// As `status` and `explain` call it.
    pub fn as_str(self) -> &'static str {
        match self {
            FrontEnd::DevicePlugin => "device plugin",
            FrontEnd::Dra => "DRA",
        }
    }
}

/// Which one the configuration wants to sell this GPU. What it sold before may not have ended yet.
pub fn front_end_of(gpu: &Gpu, config: &Config) -> FrontEnd {
    let dra = &config.dra;
    match dra.enabled && dra.gpus.iter().any(|entry| gpu.is_named(entry)) {
        true => FrontEnd::Dra,
        false => FrontEnd::DevicePlugin,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::{cut, equal};

    fn config(text: &str) -> Config {
        Config::parse(text).unwrap()
    }

    #[test]
    fn a_gpu_has_one_seller() {
        let gpus = [Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)];
        let sellers = |text: &str| gpus.clone().map(|gpu| front_end_of(&gpu, &config(text)));
        let [plugin, dra] = [FrontEnd::DevicePlugin, FrontEnd::Dra];
        assert_eq!(sellers(""), [plugin, plugin]);
        assert_eq!(sellers("[dra]\ngpus = [\"0\"]"), [plugin, plugin], "it is off");
        assert_eq!(sellers("[dra]\nenabled = true"), [dra, dra]);
        assert_eq!(sellers("[dra]\nenabled = true\ngpus = [\"GPU-b\"]"), [plugin, dra]);
        assert_eq!(sellers("[dra]\nenabled = true\ngpus = []"), [plugin, plugin]);
    }

    #[test]
    fn the_device_plugin_gets_nothing_of_what_dra_sells() {
        let config = config("[dra]\nenabled = true\ngpus = [\"0\"]\n[share]\nreplicas = 5");
        let (claimed, plain) = (Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1));
        assert_eq!(cut(&claimed, &config), []);
        assert_eq!(cut(&plain, &config), [equal(&plain, &config)]);
        assert_eq!(equal(&claimed, &config).count, 5);
    }
}
