//! Traffic on the lab: servers and their access log, clients, long-lived flows, hand-made packets.

pub mod access_log;
pub mod client;
pub mod flows;
pub mod fragments;
pub mod neighbour;
pub mod packet;
pub mod server;
