//! GPUs that are not sold although the configuration includes them: they are named, and those that do not answer are
//! asked again.

use tracing::info;

use super::Reloader;
use crate::inventory::GpuSelection;
use tessera_config::Gpus;
use tessera_gpu::{DiscoveryError, selected};
use tessera_model::gpu::Gpu;
use tessera_rules::capacity;
use tessera_system::locks::lock;

impl Reloader {
    /// The GPUs that `wanted` includes: those that answer, and those that are sold and do not just now. Their health
    /// says so. Blocking.
    pub(super) fn look(&self, wanted: &Gpus) -> Result<GpuSelection, String> {
        let mut gpus = match self.discovery.gpus(wanted) {
            Ok(gpus) => gpus,
            // A node may be left without any on purpose.
            Err(DiscoveryError::None { .. } | DiscoveryError::Unsellable(_)) => Vec::new(),
            Err(error) => return Err(error.to_string()),
        };
        let silent = self.discovery.silent();
        let is_silent = |gpu: &Gpu| silent.iter().any(|silent| silent.is(gpu));
        let stays = |gpu: &Gpu| {
            is_silent(gpu)
                && selected(gpu, &wanted.include, &wanted.exclude)
                && !gpus.iter().any(|found| found.uuid == gpu.uuid)
        };
        let sold: Vec<Gpu> = self.sold().into_iter().filter(stays).collect();
        gpus.extend(sold);
        gpus.sort_by_key(|gpu| (gpu.index, gpu.mig.as_ref().map(|mig| mig.index)));
        let topology = self.discovery.topology(&gpus);
        Ok(GpuSelection { gpus, topology })
    }

    /// Asks GPUs again that were left out because they did not answer, and has those sold that do. Blocking.
    pub fn ask_again(&self) {
        let silent = self.board.silent();
        if silent.is_empty() {
            return;
        }
        // A driver that hangs must not keep a new configuration waiting.
        let config = self.current.get();
        let Ok(selection) = self.look(&config.gpus) else { return };
        let _still = lock(&self.seen);
        let Some(agent) = self.agent.get() else { return };
        let now = self.current.get();
        if now.gpus != config.gpus {
            return;
        }
        let sold = self.sold();
        let is_new = |gpu: &&Gpu| !sold.iter().any(|sold| sold.uuid == gpu.uuid);
        let new: Vec<&Gpu> = selection.gpus.iter().filter(is_new).collect();
        if new.is_empty() {
            return self.say_unsold();
        }
        let problems = capacity::check(&selection.gpus, &now);
        if let Some(problem) = problems.first() {
            let new: Vec<String> = new.iter().map(ToString::to_string).collect();
            let text = format!(
                "{} answers again and is not sold: with it the configuration is impossible: {}",
                new.join(", "),
                problem.message
            );
            return self.board.set_condition("unsold", Some(text));
        }
        let was_lost = |gpu: &&Gpu| silent.iter().any(|(silent, _)| silent.lost && silent.is(gpu));
        let (new, lost): (Vec<Gpu>, Vec<Gpu>) = (
            new.iter().copied().cloned().collect(),
            new.iter().copied().filter(was_lost).cloned().collect(),
        );
        agent.reload((*now).clone(), Some(selection));
        for gpu in lost {
            agent.inventory().was_gone(&gpu.uuid);
        }
        for gpu in new {
            info!(%gpu, "a GPU answers again and is sold");
        }
        self.say_unsold();
    }

    /// Names what is not sold, in the log and in `status`, as the driver was last asked.
    pub fn say_unsold(&self) {
        let sold = self.sold();
        let mut silent = self.discovery.silent();
        // Of what is sold its health speaks.
        silent.retain(|silent| !sold.iter().any(|gpu| silent.is(gpu)));
        let mut sentences = self.discovery.unsold();
        sentences.extend(silent.iter().map(ToString::to_string));
        self.board.set_silent(silent);
        let text = Some(sentences.join("; ")).filter(|text| !text.is_empty());
        self.board.set_condition("unsold", text);
    }

    fn sold(&self) -> Vec<Gpu> {
        self.agent.get().map_or_else(Vec::new, |agent| agent.inventory().catalogue().devices())
    }
}
