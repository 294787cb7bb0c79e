//! The gRPC contracts of the node: kubelet's device plugin, pod resources, plugin registration and DRA APIs.
//!
//! The `.proto` files are in `proto/`; the code under `src/gen` is generated from them and committed,
//! so that building needs no protobuf compiler. `proto/generate` writes it again, and `make lint` says when it
//! must.
#![warn(missing_docs)]

/// Device plugin API v1beta1: served by the plugin, `Registration` by kubelet.
pub mod deviceplugin {
    include!("gen/deviceplugin_v1beta1.rs");

    /// The API version that goes into [`RegisterRequest::version`].
    pub const VERSION: &str = "v1beta1";
    /// [`Device::health`] of a device that may be handed out.
    pub const HEALTHY: &str = "Healthy";
    /// [`Device::health`] of a device that may not.
    pub const UNHEALTHY: &str = "Unhealthy";
    /// File name of kubelet's own socket in the device plugin directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}

/// Pod resources API v1: served by kubelet.
pub mod podresources {
    include!("gen/podresources_v1.rs");
}

/// Plugin registration API v1: how DRA drivers register.
pub mod pluginregistration {
    include!("gen/pluginregistration_v1.rs");
}

/// DRA: claims prepared for pods; served by the driver.
pub mod dra {
    /// DRA API v1.
    pub mod v1 {
        include!("gen/dra_v1.rs");
    }
}

/// Health of DRA devices: served by the driver. Both versions have the same messages.
pub mod dra_health {
    /// Health API v1.
    pub mod v1 {
        include!("gen/dra_health_v1.rs");
    }

    /// Health API v1alpha1, the only one that kubelet 1.36 calls.
    pub mod v1alpha1 {
        include!("gen/dra_health_v1alpha1.rs");
    }
}
