//! Who sends and who answers on the lab.

pub mod access_log;
pub mod client;
pub mod flows;
pub mod fragments;
pub mod neighbour;
pub mod packet;
pub mod server;
