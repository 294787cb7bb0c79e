//! Objects that go with a value of the program.

use anyhow::Result;
use serde_json::Value;

use crate::deploy::NAMESPACE;
use crate::kubectl::Kubectl;

/// An object on the cluster, deleted when this goes.
#[derive(Debug)]
pub struct Applied<'a> {
    kubectl: &'a Kubectl,
    object: Value,
}

impl<'a> Applied<'a> {
    /// Creates or changes it.
    ///
    /// # Errors
    /// The API server's refusal.
    pub fn new(kubectl: &'a Kubectl, object: Value) -> Result<Self> {
        kubectl.apply(&object)?;
        Ok(Self { kubectl, object })
    }

    /// As it is now, in the tenants' namespace if it is in one.
    ///
    /// # Errors
    /// It is gone.
    pub fn now(&self) -> Result<Value> {
        let (kind, name) = (&self.object["kind"], &self.object["metadata"]["name"]);
        let name = format!("{}/{}", kind.as_str().unwrap_or(""), name.as_str().unwrap_or(""));
        self.kubectl.get(&[&name, "-n", NAMESPACE])
    }
}

impl Drop for Applied<'_> {
    fn drop(&mut self) {
        let text = self.object.to_string();
        let delete = ["delete", "-f", "-", "--ignore-not-found", "--timeout=50s"];
        if let Err(error) = self.kubectl.try_run(&delete, Some(&text)) {
            println!("     {} stays: {error:#}", self.object["metadata"]["name"]);
        }
    }
}
