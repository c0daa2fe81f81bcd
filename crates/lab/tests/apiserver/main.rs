//! The lab's API server against its real clients: `kubectl` where it is installed, and kube's client and runtime.
//!
//! Each test starts a server of its own on a free loopback port.
//! Where `KUBEBUILDER_ASSETS` names a folder with etcd and kube-apiserver, each starts those in the double's place: what
//! the tests check of the double was checked on the real server that way.

mod access;
mod admission;
mod definition;
mod helm;
mod install;
mod kubectl;
mod objects;
mod outage;
mod server;
mod verbs;
mod watches;
