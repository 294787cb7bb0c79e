//! What contexts take, as measured: kept in the ledger by driver and product, and charged to the pods
//! that come from then on. Running pods keep their constant.

use std::collections::BTreeMap;
use std::sync::Arc;

use tracing::{info, warn};

use super::Inventory;
use crate::journal::Writer;
use tessera_config::Config;
use tessera_model::gpu::Gpu;
use tessera_model::quantity::format_bytes;
use tessera_rules::allocate::AdvertisedGpu;
use tessera_rules::capacity;
use tessera_store::{Change, MeasuredContext};

/// Measured constants are multiples of this, bytes: so there is an end to how often less can be seen.
const STEP: u64 = 1 << 20;

/// What is known for the driver that runs.
#[derive(Debug, Default)]
pub(super) struct Contexts {
    driver: Option<String>,
    /// Bytes by product name.
    of: BTreeMap<String, u64>,
}

impl Inventory {
    /// Takes what was measured under this driver before; asked at the start. True if it changes what is sold.
    /// Blocking.
    pub(crate) fn set_driver(&self, driver: Option<&str>) -> bool {
        let mut writer = self.journal.writer();
        if let Some(driver) = driver {
            self.know(&mut writer, driver);
        }
        self.apply(&writer)
    }

    /// Takes what a bare context of a GPU was seen to take under this driver. The least counts: a
    /// context that is seen later may have loaded something. True if it changes what is sold. Blocking.
    pub(crate) fn note_context(&self, uuid: &str, driver: &str, bytes: u64) -> bool {
        let bytes = bytes.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
        let mut writer = self.journal.writer();
        self.know(&mut writer, driver);
        let Some(gpu) = self.catalogue().gpus.get(uuid).map(|sold| sold.gpu.clone()) else {
            return false;
        };
        if !gpu.is_plausible_context(bytes) {
            return false;
        }
        let known = self.contexts.lock().of.get(&gpu.name).copied();
        if known
            .filter(|known| gpu.is_plausible_context(*known))
            .is_some_and(|known| known <= bytes)
        {
            return false;
        }
        let (driver, product) = (driver.to_owned(), gpu.name.clone());
        info!(gpu = %gpu.name, driver, bytes, "a bare context was measured");
        let contexts = vec![MeasuredContext { driver, product, bytes }];
        if let Err(error) = writer.ledger.commit(&Change { contexts, ..Change::default() }) {
            // Another process's context will tell again.
            warn!(%error, "what a context takes is not recorded");
            return false;
        }
        self.contexts.lock().of.insert(gpu.name, bytes);
        self.apply(&writer)
    }

    /// Whether a bare context of a GPU is worth a closer look: none was measured, or all took more.
    pub fn wants_context(&self, uuid: &str, bytes: u64) -> bool {
        let catalogue = self.catalogue();
        let Some(AdvertisedGpu { gpu, .. }) = catalogue.gpus.get(uuid) else { return false };
        let bytes = bytes.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
        gpu.is_plausible_context(bytes)
            && gpu.context_measured_bytes.is_none_or(|known| known > bytes)
    }

    /// Reads what is known of a driver, if it is another than the last.
    fn know(&self, writer: &mut Writer, driver: &str) {
        let mut contexts = self.contexts.lock();
        if contexts.driver.as_deref() == Some(driver) {
            return;
        }
        let of = writer.ledger.contexts(driver).unwrap_or_else(|error| {
            warn!(%error, "what contexts take is not known and will be measured again");
            BTreeMap::new()
        });
        *contexts = Contexts { driver: Some(driver.to_owned()), of };
    }

    /// Puts what is known into the catalogue; true if that changes it. Only the writer's holder does so.
    fn apply(&self, _writer: &Writer) -> bool {
        let config = self.config.get();
        let mut catalogue = self.catalogue.lock();
        let mut next = (**catalogue).clone();
        let mut changed = false;
        let contexts = self.contexts.lock();
        for sold in next.gpus.values_mut() {
            let gpu = contexts.measured(sold.gpu.clone(), &config);
            changed |= gpu != sold.gpu;
            sold.take_gpu(gpu, &config);
        }
        drop(contexts);
        if changed {
            next.edition += 1;
            *catalogue = Arc::new(next);
        }
        changed
    }

    /// These GPUs with what is known of their contexts.
    pub(super) fn measured(&self, gpus: Vec<Gpu>, config: &Config) -> Vec<Gpu> {
        let contexts = self.contexts.lock();
        gpus.into_iter().map(|gpu| contexts.measured(gpu, config)).collect()
    }
}

impl Contexts {
    /// A GPU with what is known of its contexts. What would leave a share without room for a context,
    /// which it has by the formula, is not taken: no tenant may make a configuration impossible.
    fn measured(&self, gpu: Gpu, config: &Config) -> Gpu {
        let Some(bytes) = self.of.get(&gpu.name).copied() else {
            return Gpu { context_measured_bytes: None, ..gpu };
        };
        let plain = Gpu { context_measured_bytes: None, ..gpu };
        if !plain.is_plausible_context(bytes) {
            warn!(gpu = %plain, bytes, "the ledger's figure for a context cannot be: it is measured again");
            return plain;
        }
        let measured = Gpu { context_measured_bytes: Some(bytes), ..plain.clone() };
        let is_possible = |gpu: &Gpu| capacity::check(std::slice::from_ref(gpu), config).is_empty();
        if is_possible(&measured) || !is_possible(&plain) {
            return measured;
        }
        warn!(
            gpu = %plain,
            "a context was seen to take {}, for which shares of this GPU are too small: it is charged \
             by the formula, and what it takes beyond is observed",
            format_bytes(bytes)
        );
        plain
    }
}
