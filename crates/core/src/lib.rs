//! egress_core.

pub mod allocation;
pub mod decision;
pub mod display_names;
pub mod keys;
pub mod leader_election;
pub mod model;
pub mod node_health;
pub mod notes;
pub mod ownership;
pub mod plan;
pub mod selection;
pub mod status;
pub mod text;
