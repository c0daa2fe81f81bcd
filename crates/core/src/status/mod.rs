//! What users and operators see: conditions, events, moves, counts and problems.

pub mod conditions;
pub mod foreign_writers;
pub mod moves;
pub mod node_problems;
pub mod pod_counts;
