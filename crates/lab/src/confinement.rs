//! The rights of agents and controllers on the lab's nodes: the capabilities that `deploy/base/daemonset.yaml` and
//! `controller.yaml` give to their containers and no others, in every set, and none gained by another program. A missing
//! capability shows in the lab first.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use egress_toolchain::{Paths, packages};

/// The command that starts a program confined as an agent: it replaces itself by that program.
pub fn confined(program: &str) -> Result<Vec<String>> {
    confined_by("daemonset", program)
}

/// The same, as the container of this manifest of `deploy/base`.
pub fn confined_by(manifest: &str, program: &str) -> Result<Vec<String>> {
    let granted = granted(manifest)?;
    let setpriv = packages::find("setpriv").context("setpriv is missing: it comes with util-linux")?;
    let set = granted.iter().fold("-all".to_owned(), |set, name| format!("{set},+{name}"));
    Ok(vec![
        setpriv.display().to_string(),
        "--no-new-privs".to_owned(),
        "--inh-caps=-all".to_owned(),
        "--ambient-caps=-all".to_owned(),
        format!("--bounding-set={set}"),
        program.to_owned(),
    ])
}

/// As setpriv names them.
pub fn granted(manifest: &str) -> Result<Vec<String>> {
    let manifest = Paths::find()?.root.join(format!("deploy/base/{manifest}.yaml"));
    let text = std::fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
    let first = serde_yaml::Deserializer::from_str(&text).next().context("an empty manifest")?;
    let object = Value::deserialize(first)?;
    let security = &object["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    let dropped = security.pointer("/capabilities/drop/0").and_then(Value::as_str);
    ensure!(dropped == Some("ALL"), "the container keeps what the runtime gives it");
    let names = security.pointer("/capabilities/add").and_then(Value::as_array).context("it adds no capabilities")?;
    let names: Option<Vec<_>> = names.iter().map(|name| Some(name.as_str()?.to_lowercase())).collect();
    names.context("a capability that is no name")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_says_which() {
        let command = confined("agent").expect("a command").join(" ");
        assert!(command.ends_with("--bounding-set=-all,+bpf,+net_admin,+net_raw,+perfmon agent"), "{command}");
        let command = confined_by("controller", "agent").expect("a command").join(" ");
        assert!(command.ends_with("--bounding-set=-all,+net_raw agent"), "{command}");
    }
}
