//! The assignment, tested with vectors of OVN-Kubernetes' behaviour.
//!
//! The vectors are the JSON files of the folder that `EGRESS_VECTORS` names, else of the folder next to the repository, else
//! the copy here. Each vector becomes Kubernetes objects, and is replayed in 200 orders of everything unordered.

mod cluster;
mod expectations;
mod scale;
mod vector;

use std::collections::BTreeMap;
use std::path::PathBuf;

use cluster::VectorCluster;
use egress_common::random::Random;
use vector::{Vector, VectorStatusItem};

const ORDERS: u64 = 200;

/// The result: each object's items, sorted.
type Result = BTreeMap<String, Vec<VectorStatusItem>>;

fn folder() -> PathBuf {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let beside = package.join("../../shared/vectors");
    match std::env::var_os("EGRESS_VECTORS") {
        Some(folder) => folder.into(),
        None if beside.is_dir() => beside,
        None => package.join("tests/allocation"),
    }
}

/// Creates the objects one after another if the vector says so, else all at once.
fn replay(vector: &Vector, at_once: bool, numbers: &mut Random) -> std::result::Result<Result, String> {
    let mut cluster = VectorCluster::new(vector, numbers);
    let later = if at_once { &[][..] } else { &vector.sequential[..] };
    let first = vector.egressips.iter().filter(|object| !later.contains(&object.name));
    cluster.create(first, numbers);
    cluster.settle(numbers);
    for name in later {
        cluster.create(vector.egressips.iter().filter(|object| object.name == *name), numbers);
        cluster.settle(numbers);
    }
    let before = cluster.items();
    cluster.settle(numbers);
    if cluster.items() != before {
        return Err(format!("a second decision differs: {before:?}, then {:?}", cluster.items()));
    }
    expectations::check(vector, &cluster)?;
    Ok(before)
}

fn check(vector: &Vector) -> std::result::Result<(), String> {
    let mut modes = vec![false];
    if !vector.sequential.is_empty() && vector.holds_at_restart {
        modes.push(true);
    }
    for at_once in modes {
        let mut first = None;
        for order in 0..ORDERS {
            let result = replay(vector, at_once, &mut Random::new(order));
            let result = result.map_err(|problem| format!("order {order}, all at once {at_once}: {problem}"))?;
            let first = first.get_or_insert_with(|| result.clone());
            if *first != result {
                return Err(format!("order {order} gives {result:?}, the first gave {first:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn vectors_hold_in_every_order() {
    let folder = folder();
    let files = vector::read(&folder);
    let mut problems = Vec::new();
    for (file, vectors) in &files {
        assert!(!vectors.is_empty(), "{file} has no vectors");
        let failed = vectors.iter().filter_map(|vector| Some((vector, check(vector).err()?)));
        problems.extend(failed.map(|(vector, problem)| format!("{file}: {}: {problem}", vector.name)));
    }
    let count: usize = files.iter().map(|(_, vectors)| vectors.len()).sum();
    println!("{count} vectors in {} files of {}", files.len(), folder.display());
    assert!(count > 0, "no vectors in {}", folder.display());
    assert!(problems.is_empty(), "{} of {count} vectors:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn the_copy_equals_the_original() {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let copy = std::fs::read_to_string(package.join("tests/allocation/allocation.json")).expect("the copy");
    match std::fs::read_to_string(package.join("../../shared/vectors/allocation.json")) {
        Ok(original) => assert!(copy == original, "the copy is not up to date"),
        Err(_) => assert!(copy.starts_with('['), "there is no original"),
    }
}
