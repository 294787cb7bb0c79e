//! A stage's GPU: one thread that owns the context and takes requests in turn, because CUDA calls wait.

use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tessera_tenant_program::cuda::{self, Cuda, Kernel, Stream};
use tessera_tenant_program::driver::Resolve;
use tessera_tenant_program::exit::{CudaError, Exit};
use tessera_tenant_program::memory::{Api, Block};
use tessera_tenant_program::{Device, Target};
use tokio::sync::oneshot;

use crate::math;

/// Which part of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Pixels to floats.
    Preprocess,
    /// Floats to logits.
    Model,
    /// Logits to a class.
    Postprocess,
}

impl Stage {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Preprocess => "preprocess",
            Stage::Model => "model",
            Stage::Postprocess => "postprocess",
        }
    }
}

impl std::str::FromStr for Stage {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let all = [Stage::Preprocess, Stage::Model, Stage::Postprocess];
        all.into_iter().find(|stage| stage.name() == text).ok_or(())
    }
}

/// What a stage has on its GPU, and how long it works.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Which part.
    pub stage: Stage,
    /// GPU time of one request.
    pub kernel: Duration,
    /// Device memory that it holds besides, as a model's other layers would.
    pub resident_bytes: u64,
}

type Answer = Result<Vec<u8>, String>;

/// The thread's other end.
#[derive(Clone, Debug)]
pub struct Gpu {
    requests: mpsc::Sender<(Vec<u8>, oneshot::Sender<Answer>)>,
    pub uuid: String,
    /// What this process sees of its memory.
    pub memory_bytes: u64,
}

impl Gpu {
    /// Opens the first GPU that this process sees, and loads what stays there.
    ///
    /// # Errors
    /// No driver, no GPU, or no room in the quota.
    pub fn open(work: Work) -> Result<Self> {
        let (requests, todo) = mpsc::channel::<(Vec<u8>, oneshot::Sender<Answer>)>();
        let (opened, open) = mpsc::channel();
        std::thread::Builder::new().name("gpu".into()).spawn(move || {
            match Session::open(work) {
                Ok(mut session) => {
                    let seen = (session.uuid.clone(), session.memory_bytes);
                    let _ = opened.send(Ok(seen));
                    // Ends with the last `Gpu`. A client that is gone needs no answer.
                    for (input, reply) in todo {
                        let _ = reply.send(session.run(&input));
                    }
                }
                Err(exit) => drop(opened.send(Err(exit))),
            }
        })?;
        let (uuid, memory_bytes) = open.recv()?.map_err(|exit: Exit| anyhow!(exit.message))?;
        Ok(Gpu { requests, uuid, memory_bytes })
    }

    /// Does this stage's part with `input`, after those who came before.
    ///
    /// # Errors
    /// CUDA's.
    pub async fn run(&self, input: Vec<u8>) -> Result<Vec<u8>> {
        let (reply, answer) = oneshot::channel();
        self.requests.send((input, reply)).ok().context("the GPU's thread has ended")?;
        answer.await.context("the GPU's thread has ended")?.map_err(|text| anyhow!(text))
    }
}

struct Session {
    work: Work,
    cuda: Cuda,
    stream: Stream,
    kernel: Kernel,
    weights: Option<Block>,
    buffer: Block,
    uuid: String,
    memory_bytes: u64,
}

impl Session {
    fn open(work: Work) -> Result<Self, Exit> {
        let target = Target { resolve: Resolve::ProcAddress, device: Device::Ordinal(0) };
        let driver = cuda::initialise(target)?;
        let (uuid, _, memory_bytes) = cuda::describe(&driver, 0)?;
        let cuda = Cuda::on(driver, 0)?;
        let weights = match work.stage {
            Stage::Model => {
                let block = cuda.allocate(Api::Plain, math::WEIGHTS as u64, Stream::LEGACY)?;
                cuda.write(&block, 0, &math::to_bytes(&math::weights()))?;
                Some(block)
            }
            _ => None,
        };
        if work.resident_bytes > 0 {
            // Held until the process ends.
            cuda.allocate(Api::Plain, work.resident_bytes, Stream::LEGACY)?;
        }
        let bytes = (math::PIXELS * size_of::<f32>()) as u64;
        let buffer = cuda.allocate(Api::Plain, bytes, Stream::LEGACY)?;
        let (stream, kernel) = (cuda.stream()?, cuda.kernel()?);
        Ok(Session { work, cuda, stream, kernel, weights, buffer, uuid, memory_bytes })
    }

    fn run(&mut self, input: &[u8]) -> Answer {
        let described = |error: CudaError| format!("{} returned {}", error.call, error.code);
        let input = self.through_device(input).map_err(described)?;
        Ok(match (self.work.stage, &self.weights) {
            (Stage::Preprocess, _) => math::to_bytes(&math::preprocess(&input)),
            (Stage::Model, Some(weights)) => {
                let mut bytes = vec![0; math::WEIGHTS];
                self.cuda.read(weights, 0, &mut bytes).map_err(described)?;
                math::to_bytes(&math::model(&math::from_bytes(&input), &math::from_bytes(&bytes)))
            }
            _ => math::to_bytes(&math::postprocess(&math::from_bytes(&input))),
        })
    }

    /// To the device, a kernel, and back.
    fn through_device(&self, input: &[u8]) -> Result<Vec<u8>, CudaError> {
        let mut back = vec![0; input.len().min(math::PIXELS * size_of::<f32>())];
        self.cuda.write(&self.buffer, 0, &input[..back.len()])?;
        let ns = u64::try_from(self.work.kernel.as_nanos()).unwrap_or(u64::MAX);
        self.cuda.launch(&self.kernel, ns, self.stream)?;
        self.cuda.wait(&self.kernel, self.stream)?;
        self.cuda.read(&self.buffer, 0, &mut back)?;
        Ok(back)
    }
}
