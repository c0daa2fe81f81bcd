//! CNI plugins, called as container runtimes call them.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::Netns;

/// Calls a plugin on a node, in an environment of these variables alone (and the lab's mark).
///
/// # Errors
/// It cannot be started. That it fails is none.
pub fn call(node: &Netns, plugin: &Path, variables: &BTreeMap<&str, &str>, input: &str) -> Result<Output> {
    let mut command = node.command(&plugin.to_string_lossy());
    let mark: Vec<(String, String)> = command
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_string_lossy().into_owned(), value?.to_string_lossy().into_owned())))
        .collect();
    command.env_clear().envs(mark).envs(variables);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    node.run(|| {
        let mut child = command.spawn().with_context(|| format!("start {}", plugin.display()))?;
        // One that needs no input may have ended.
        let _ended = child.stdin.take().context("a pipe")?.write_all(input.as_bytes());
        Ok(child.wait_with_output()?)
    })
}

/// The same for the interface `net1` of a pod; its result, or nothing.
///
/// # Errors
/// The plugin fails.
pub fn attach(node: &Netns, pod: &Netns, plugin: &Path, command: &str, config: &Value) -> Result<Value> {
    let netns = pod.path().display().to_string();
    let folder = plugin.parent().unwrap_or(Path::new("/")).display().to_string();
    let variables = BTreeMap::from([
        ("CNI_COMMAND", command),
        ("CNI_CONTAINERID", pod.name()),
        ("CNI_IFNAME", "net1"),
        ("CNI_NETNS", &netns),
        ("CNI_PATH", &folder),
    ]);
    let output = call(node, plugin, &variables, &config.to_string())?;
    let (said, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{} {command}: {said}{log}", plugin.display());
    if said.trim().is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_str(&said)?) }
}
