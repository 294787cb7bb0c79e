//! tessera-kubelet.
