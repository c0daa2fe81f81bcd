//! The node's plugin chain: the first configuration in the runtime's directory, a list of plugins in JSON (`.conflist`).
//!
//! A CNI may rewrite its file, so the chain is checked again and again. Files are replaced atomically: a runtime reads either the
//! old or the new one.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use egress_cni::files;
use serde_json::{Value, json};

use crate::cni::PLUGIN;

/// What libcni reads.
const EXTENSIONS: [&str; 3] = ["conf", "conflist", "json"];

#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error("{path}: {source}", path = .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("there is no configuration of a CNI in {path} yet", path = .0.display())]
    NoChain(PathBuf),
    #[error(
        "{path}, which the runtime reads first, is no list of plugins: only a list can be extended \
         (a file NAME.conflist with the field \"plugins\")", path = .0.display()
    )]
    NoList(PathBuf),
}

fn of(path: &Path) -> impl FnOnce(io::Error) -> ChainError {
    let path = path.to_owned();
    move |source| ChainError::File { path, source }
}

/// The configuration that a runtime uses: the first by name.
fn first(folder: &Path) -> Result<PathBuf, ChainError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(of(folder))? {
        let path = entry.map_err(of(folder))?.path();
        let is_read =
            path.extension().and_then(|extension| extension.to_str()).is_some_and(|e| EXTENSIONS.contains(&e));
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        files.extend((is_read && !is_hidden).then_some(path));
    }
    files.into_iter().min().ok_or_else(|| ChainError::NoChain(folder.to_owned()))
}

/// The chain with `plugin` at its end, or without it. `None` if it is so already.
fn edited(chain: &Value, plugin: Option<&Value>) -> Option<Value> {
    let plugins = chain["plugins"].as_array()?;
    let others = plugins.iter().filter(|one| one["type"] != PLUGIN).cloned();
    let wanted: Vec<Value> = others.chain(plugin.cloned()).collect();
    if wanted == *plugins {
        return None;
    }
    let mut chain = chain.clone();
    chain["plugins"] = Value::Array(wanted);
    Some(chain)
}

fn read(path: &Path) -> Result<Value, ChainError> {
    let text = fs::read_to_string(path).map_err(of(path))?;
    let chain: Value = serde_json::from_str(&text).map_err(|_| ChainError::NoList(path.to_owned()))?;
    if chain["plugins"].is_array() { Ok(chain) } else { Err(ChainError::NoList(path.to_owned())) }
}

/// Adds the plugin at the end of the chain. Returns the changed file.
///
/// # Errors
/// There is no chain yet, or it cannot be read or written.
pub fn add(folder: &Path, socket: &Path) -> Result<Option<PathBuf>, ChainError> {
    let path = first(folder)?;
    let plugin = json!({"type": PLUGIN, "socket": socket});
    let Some(chain) = edited(&read(&path)?, Some(&plugin)) else { return Ok(None) };
    replace(&path, &text(&chain))?;
    Ok(Some(path))
}

/// Removes the plugin from all chains in the directory. Returns the changed files.
///
/// # Errors
/// A file cannot be read or written. A file that is no list is skipped.
pub fn remove(folder: &Path) -> Result<Vec<PathBuf>, ChainError> {
    let mut changed = Vec::new();
    for entry in fs::read_dir(folder).map_err(of(folder))? {
        let path = entry.map_err(of(folder))?.path();
        if !path.is_file() {
            continue;
        }
        let Ok(chain) = read(&path) else { continue };
        if let Some(chain) = edited(&chain, None) {
            replace(&path, &text(&chain))?;
            changed.push(path);
        }
    }
    Ok(changed)
}

fn text(chain: &Value) -> Vec<u8> {
    format!("{chain:#}\n").into_bytes()
}

/// Copies the program to the CNI's binaries if it is missing or differs. Returns its path if it was written.
///
/// # Errors
/// It cannot be read or written.
pub fn add_program(folder: &Path, program: &Path) -> Result<Option<PathBuf>, ChainError> {
    let path = folder.join(PLUGIN);
    let wanted = fs::read(program).map_err(of(program))?;
    let is_written = files::ensure(&path, &wanted, 0o755).map_err(of(&path))?;
    Ok(is_written.then_some(path))
}

/// Removes the program. Returns its path if it existed.
///
/// # Errors
/// It cannot be removed.
pub fn remove_program(folder: &Path) -> Result<Option<PathBuf>, ChainError> {
    let path = folder.join(PLUGIN);
    let is_removed = files::remove(&path).map_err(of(&path))?;
    Ok(is_removed.then_some(path))
}

/// Keeps the permissions of the file.
fn replace(path: &Path, content: &[u8]) -> Result<(), ChainError> {
    let mode = fs::metadata(path).map_err(of(path))?.permissions().mode();
    files::replace(path, content, mode).map_err(of(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("egress-agent-chain-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }

        fn put(&self, name: &str, content: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, content).expect("a file");
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    const LIST: &str = r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge"},{"type":"portmap"}]}"#;

    fn types(path: &Path) -> Vec<String> {
        let chain: Value = serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON");
        let plugins = chain["plugins"].as_array().expect("a list").iter();
        plugins.map(|plugin| plugin["type"].as_str().expect("a type").to_owned()).collect()
    }

    #[test]
    fn the_plugin_is_added_to_the_first_chain_and_removed_without_a_trace() {
        let folder = Folder::new("last");
        let (first, second) = (folder.put("10-a.conflist", LIST), folder.put("20-b.conflist", LIST));
        folder.put(".05-half.conflist", "{");
        folder.put("00-notes.txt", "none");
        fs::set_permissions(&first, fs::Permissions::from_mode(0o600)).expect("ours");
        let socket = Path::new("/run/egress-agent/agent.sock");
        assert_eq!(add(&folder.0, socket).expect("a chain"), Some(first.clone()));
        assert_eq!(types(&first), ["bridge", "portmap", PLUGIN]);
        assert_eq!(fs::metadata(&first).expect("there").permissions().mode() & 0o777, 0o600);
        assert_eq!(types(&second), ["bridge", "portmap"]);
        assert_eq!(add(&folder.0, socket).expect("a chain"), None, "it is so already");
        // The CNI rewrites its file; the socket moves.
        folder.put("10-a.conflist", LIST);
        assert_eq!(add(&folder.0, Path::new("/elsewhere")).expect("a chain"), Some(first.clone()));
        assert_eq!(add(&folder.0, socket).expect("a chain"), Some(first.clone()));
        assert_eq!(types(&first), ["bridge", "portmap", PLUGIN]);
        assert_eq!(remove(&folder.0).expect("files"), vec![first.clone()]);
        assert_eq!(types(&first), ["bridge", "portmap"]);
        assert!(remove(&folder.0).expect("files").is_empty());
        let left = fs::read_dir(&folder.0).expect("a folder").count();
        assert_eq!(left, 4, "no temporary file");
    }

    #[test]
    fn a_file_that_is_no_chain_is_named_and_unchanged() {
        let folder = Folder::new("none");
        assert!(matches!(add(&folder.0, Path::new("/s")), Err(ChainError::NoChain(_))));
        let single = r#"{"cniVersion":"1.0.0","name":"n","type":"bridge"}"#;
        for content in [single, "{", "[]", r#"{"plugins":{}}"#] {
            let file = folder.put("10-a.conf", content);
            let refused = add(&folder.0, Path::new("/s")).expect_err(content).to_string();
            assert!(refused.contains("10-a.conf") && refused.contains("plugins"), "{refused}");
            assert_eq!(fs::read_to_string(&file).expect("there"), content);
            assert!(remove(&folder.0).expect("files").is_empty());
        }
    }

    #[test]
    fn the_program_is_written_if_it_differs() {
        let folder = Folder::new("program");
        let program = folder.put("egress-agent", "one");
        let put = |program: &Path| add_program(&folder.0, program).expect("written");
        let there = folder.0.join(PLUGIN);
        assert_eq!((put(&program), put(&program)), (Some(there.clone()), None));
        assert_eq!(fs::metadata(&there).expect("there").permissions().mode() & 0o777, 0o755);
        folder.put("egress-agent", "two");
        assert_eq!(put(&program), Some(there.clone()));
        assert_eq!(remove_program(&folder.0).expect("removed"), Some(there));
        assert_eq!(remove_program(&folder.0).expect("gone"), None);
    }
}
