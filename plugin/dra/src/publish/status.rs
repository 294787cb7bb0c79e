//! How the publication stands: for `status`, metrics and an event.

/// Whether the API server has what it should.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Nothing is known of the API server yet.
    #[default]
    Starting,
    /// Writes are due.
    Writing,
    /// It has what it should.
    Published,
    /// It does not answer, or refuses; [`Status::error`] says why.
    Failing,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Writing => "writing",
            State::Published => "published",
            State::Failing => "failing",
        }
    }
}

/// How the publication stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Whether the API server has what it should.
    pub state: State,
    /// Devices that should be published.
    pub devices: usize,
    /// Slices that they take.
    pub slices: usize,
    /// The pool's generation.
    pub generation: i64,
    /// Writes since the start.
    pub writes: u64,
    /// How often another removed slices, kubelet at its start for instance.
    pub wipes: u64,
    /// The API server keeps no taints: a GPU that is sick or cordoned is not published at all.
    pub without_taints: bool,
    /// The API server dropped fields that the driver can do without.
    pub other_fields_dropped: bool,
    /// GPUs that are not published, and why.
    pub problems: Vec<String>,
    /// What the API server said to the last request, if it refused.
    pub error: Option<String>,
}

impl Status {
    /// What a person should know, a sentence each; empty when all is well.
    pub fn sentences(&self) -> Vec<String> {
        let mut said = self.lacks();
        if let Some(error) = &self.error {
            said.push(format!("the ResourceSlices are not as they should be: {error}"));
        }
        said.extend(self.problems.iter().cloned());
        said
    }

    /// What the API server lacks that the driver uses, a sentence each.
    pub fn lacks(&self) -> Vec<String> {
        let mut said = Vec::new();
        if self.without_taints {
            said.push(
                "the API server dropped the taints of devices (feature gate DRADeviceTaints): GPUs that are sick or \
                 cordoned are taken out of the ResourceSlices instead"
                    .to_owned(),
            );
        }
        said
    }
}
