//! What most scenarios use.

pub(crate) use std::collections::{BTreeMap, BTreeSet};
pub(crate) use std::net::{IpAddr, Ipv4Addr, SocketAddr};
pub(crate) use std::path::{Path, PathBuf};
pub(crate) use std::thread;
pub(crate) use std::time::{Duration, Instant};

pub(crate) use anyhow::{Context, Result, bail, ensure};
pub(crate) use egress_lab::agents::{Agent, AgentOptions};
pub(crate) use egress_lab::api_objects::{ASSIGNABLE, EGRESS_IPS, all, assigned, egress_ip, labels};
pub(crate) use egress_lab::capture::{AddressKind, Capture};
pub(crate) use egress_lab::pins::AgentPins;
pub(crate) use egress_lab::test::{LabContext, LabTest, NO_LOAD_BALANCER, Skip};
pub(crate) use egress_lab::test_cluster::{Observed, TestCluster, node, observe, pod};
pub(crate) use egress_lab::topology::addresses::{self as plan, ECHO_PORT, HTTP_PORT, NodeNumber};
pub(crate) use egress_lab::traffic::client::{self, Ping};
pub(crate) use egress_lab::traffic::flows::TrafficFlow;
pub(crate) use egress_lab::traffic::server::Server;
pub(crate) use egress_lab::wait::{EFFECT, time_until, until, until_logged, until_true};
pub(crate) use egress_lab::{HostConfig, Lab, LabBuilder, LabNode, LabPod, Netns, PodSpec};
pub(crate) use serde_json::{Value, json};
