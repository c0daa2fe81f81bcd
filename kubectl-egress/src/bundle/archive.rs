//! The archive: files below one folder, and a summary that says what is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use tar::{Builder, Header};

/// The folder of all files.
const FOLDER: &str = "egress-bundle";
/// Largest file, and all files together (bytes, uncompressed).
const LARGEST_FILE: usize = 16 << 20;
const LARGEST_ARCHIVE: usize = 512 << 20;

/// What the archive says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct BundleSummary {
    pub(crate) plugin_version: &'static str,
    pub(crate) kubernetes_version: Option<String>,
    /// Of each node's agent.
    pub(crate) agent_versions: BTreeMap<String, String>,
    /// What could not be collected, with the reason.
    pub(crate) missing: BTreeMap<String, String>,
    /// Files that were cut at a limit.
    pub(crate) cut: BTreeSet<String>,
}

pub(crate) struct BundleArchive<W: Write> {
    tar: Builder<GzEncoder<W>>,
    written: usize,
    seconds: u64,
    pub(crate) summary: BundleSummary,
}

impl<W: Write> BundleArchive<W> {
    pub(crate) fn new(to: W) -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let summary = BundleSummary { plugin_version: env!("CARGO_PKG_VERSION"), ..BundleSummary::default() };
        Self { tar: Builder::new(GzEncoder::new(to, Compression::default())), written: 0, seconds, summary }
    }

    /// A file that exceeds the limits is cut, at its end, and named in the summary.
    pub(crate) fn add(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        let room = LARGEST_FILE.min(LARGEST_ARCHIVE.saturating_sub(self.written));
        let kept = content.get(..room).unwrap_or(content);
        if kept.len() < content.len() {
            self.summary.cut.insert(name.to_owned());
        }
        self.written += kept.len();
        self.append(name, kept)
    }

    pub(crate) fn miss(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.summary.missing.insert(what.into(), why.into());
    }

    fn append(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.seconds);
        self.tar.append_data(&mut header, format!("{FOLDER}/{name}"), content)
    }

    /// Adds the summary, and completes the archive.
    pub(crate) fn finish(mut self) -> io::Result<(W, BundleSummary)> {
        let summary = serde_json::to_vec_pretty(&self.summary)?;
        self.append("summary.json", &summary)?;
        Ok((self.tar.into_inner()?.finish()?, self.summary))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    /// The files of an archive, without the folder.
    pub(crate) fn files(archive: &[u8]) -> BTreeMap<String, String> {
        let mut archive = tar::Archive::new(GzDecoder::new(archive));
        let read = |entry: io::Result<tar::Entry<'_, _>>| {
            let mut entry: tar::Entry<'_, GzDecoder<&[u8]>> = entry.expect("an entry");
            let path = entry.path().expect("a path").display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).expect("text");
            (path.strip_prefix("egress-bundle/").expect("the folder").to_owned(), text)
        };
        archive.entries().expect("an archive").map(read).collect()
    }

    #[test]
    fn the_archive_has_its_files_and_says_what_is_missing_or_cut() {
        let mut archive = BundleArchive::new(Vec::new());
        archive.add("objects/nodes.json", b"[]").expect("written");
        archive.add("logs/long.log", &vec![b'x'; LARGEST_FILE + 1]).expect("written");
        archive.miss("node n3", "no agent");
        let (bytes, summary) = archive.finish().expect("complete");
        let files = files(&bytes);
        assert_eq!(files["objects/nodes.json"], "[]");
        assert_eq!(files["logs/long.log"].len(), LARGEST_FILE);
        assert_eq!(
            (&summary.cut, summary.missing["node n3"].as_str()),
            (&BTreeSet::from(["logs/long.log".to_owned()]), "no agent")
        );
        assert!(files["summary.json"].contains("\"node n3\": \"no agent\""), "{}", files["summary.json"]);
    }
}
