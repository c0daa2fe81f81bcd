//! The lab's API server against its real clients: `kubectl` where it is installed, and kube's client and runtime.
//!
//! Each test starts a server of its own (`cargo xtask apiserver` on a free loopback port) and stops it by its process id.

mod kubectl;
mod objects;
mod outage;
mod server;
mod verbs;
mod watches;
