//! From a path to what it names: a document about the server, or a resource.

use std::sync::Arc;

use super::kind::{self, Kind};
use super::registry::Registry;
use super::status::ApiError;
use super::verbs::Subresource;

pub(super) enum ApiRoute {
    Healthy,
    Version,
    CoreVersions,
    Groups,
    Group(String),
    Resources { group: String, version: String },
    OpenApiV2,
    OpenApiV3Index,
    OpenApiV3 { group: String, version: String },
    Resource(RouteTarget),
}

pub(super) struct RouteTarget {
    pub kind: Arc<Kind>,
    /// None: every namespace, or a cluster-scoped kind.
    pub namespace: Option<String>,
    /// None: the collection.
    pub name: Option<String>,
    pub subresource: Subresource,
}

impl ApiRoute {
    pub(super) fn parse(registry: &Registry, path: &str) -> Result<Self, ApiError> {
        let segments: Vec<String> =
            path.split('/').filter(|segment| !segment.is_empty()).map(percent_decoded).collect();
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        match segments.as_slice() {
            ["healthz" | "livez" | "readyz", ..] => Ok(Self::Healthy),
            ["version"] => Ok(Self::Version),
            ["api"] => Ok(Self::CoreVersions),
            ["apis"] => Ok(Self::Groups),
            ["openapi", "v2"] => Ok(Self::OpenApiV2),
            ["openapi", "v3"] => Ok(Self::OpenApiV3Index),
            ["openapi", "v3", "api", version] => {
                Ok(Self::OpenApiV3 { group: String::new(), version: (*version).to_owned() })
            }
            ["openapi", "v3", "apis", group, version] => {
                Ok(Self::OpenApiV3 { group: (*group).to_owned(), version: (*version).to_owned() })
            }
            ["apis", group] => Ok(Self::Group((*group).to_owned())),
            ["api", version] => Ok(Self::Resources { group: String::new(), version: (*version).to_owned() }),
            ["apis", group, version] => {
                Ok(Self::Resources { group: (*group).to_owned(), version: (*version).to_owned() })
            }
            ["api", version, rest @ ..] => target(registry, "", version, rest).map(Self::Resource),
            ["apis", group, version, rest @ ..] => target(registry, group, version, rest).map(Self::Resource),
            _ => Err(ApiError::no_such_path()),
        }
    }
}

fn target(registry: &Registry, group: &str, version: &str, rest: &[&str]) -> Result<RouteTarget, ApiError> {
    let (namespace, plural, name, subresource) = match rest {
        ["namespaces", name, sub @ ("status" | "finalize")] if group.is_empty() => {
            (None, "namespaces", Some(*name), Some(*sub))
        }
        ["namespaces", namespace, plural] => (Some(*namespace), *plural, None, None),
        ["namespaces", namespace, plural, name] => (Some(*namespace), *plural, Some(*name), None),
        ["namespaces", namespace, plural, name, sub] => (Some(*namespace), *plural, Some(*name), Some(*sub)),
        [plural] => (None, *plural, None, None),
        [plural, name] => (None, *plural, Some(*name), None),
        [plural, name, sub] => (None, *plural, Some(*name), Some(*sub)),
        _ => return Err(ApiError::no_such_path()),
    };
    let kind = registry.find(group, version, plural).ok_or_else(ApiError::no_such_path)?;
    let is_placed = if kind.namespaced { namespace.is_some() || name.is_none() } else { namespace.is_none() };
    let subresource = match subresource {
        None => Subresource::Main,
        Some("status") if kind.traits.status_subresource => Subresource::Status,
        Some("token") if &*kind.storage == kind::SERVICE_ACCOUNTS => Subresource::Token,
        Some(_) => return Err(ApiError::no_such_path()),
    };
    if !is_placed {
        return Err(ApiError::no_such_path());
    }
    Ok(RouteTarget { kind, namespace: namespace.map(str::to_owned), name: name.map(str::to_owned), subresource })
}

fn percent_decoded(segment: &str) -> String {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let code = (first == b'%').then(|| tail.get(..2)).flatten();
        let code = code.and_then(|hex| std::str::from_utf8(hex).ok()).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(path: &str) -> Option<(String, Option<String>, Option<String>, Subresource)> {
        match ApiRoute::parse(&Registry::new(), path) {
            Ok(ApiRoute::Resource(target)) => {
                Some((target.kind.plural.clone(), target.namespace, target.name, target.subresource))
            }
            _ => None,
        }
    }

    #[test]
    fn paths_of_resources() {
        let some = |text: &str| Some(text.to_owned());
        let main = Subresource::Main;
        assert_eq!(resource("/api/v1/pods"), Some(("pods".into(), None, None, main)));
        assert_eq!(resource("/api/v1/namespaces"), Some(("namespaces".into(), None, None, main)));
        assert_eq!(resource("/api/v1/namespaces/a"), Some(("namespaces".into(), None, some("a"), main)));
        assert_eq!(resource("/api/v1/namespaces/a/pods"), Some(("pods".into(), some("a"), None, main)));
        assert_eq!(resource("/api/v1/namespaces/a/pods/b%2Ec"), Some(("pods".into(), some("a"), some("b.c"), main)));
        let status = Subresource::Status;
        assert_eq!(resource("/api/v1/namespaces/a/status"), Some(("namespaces".into(), None, some("a"), status)));
        assert_eq!(resource("/api/v1/nodes/n/status"), Some(("nodes".into(), None, some("n"), status)));
        for nothing in
            ["/api/v1/pods/x", "/api/v1/namespaces/a/nodes", "/api/v1/gadgets", "/api/v1/nodes/n/proxy", "/x"]
        {
            assert_eq!(resource(nothing), None, "{nothing}");
        }
    }
}
