//! OpenShift's EgressRouters, while this controller leads: the objects that make a pod a router, and what has become of each.
//!
//! Objects are written when the EgressRouter changes, when its Deployment is gone, and once by each new leader. What others change
//! in them in the meantime is left alone, so that two writers do not fight. A router that cannot be made degrades itself and no
//! other; what was made of it before stays.

use std::collections::BTreeMap;

use egress_router::manifests::{NamedRouter, of_egress_router};
use kube::Client;
use kube::api::DynamicObject;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::change_queue::ChangeReceiver;
use crate::controller::conversion::{self, Conversion, KnownCluster, all, timed};
use egress_core::model::services::ServiceKey;
use egress_core::status::conditions::DesiredCondition;
use egress_kube::api_outage::ApiOutages;
use egress_kube::egress_router::{
    CONFIGURATION, OF_ROUTER, RouterChange, RouterDeployment, RouterView, RouterWriter, RouterWritten, StoredRouter,
    status_value, watches,
};
use egress_kube::leader_election::Leadership;
use egress_kube::policy::status::WriteError;

/// What the task needs.
pub(super) struct EgressRouterTask {
    pub(super) client: Client,
    pub(super) outages: ApiOutages,
    pub(super) leadership: Leadership,
    /// Of the routers' pods.
    pub(super) image: String,
}

impl EgressRouterTask {
    /// Runs until stopped.
    pub(super) async fn run(self, cluster: ChangeReceiver, stop: CancellationToken) {
        let Self { client, outages, leadership, image } = self;
        let conversion = RouterConversion {
            view: RouterView::default(),
            image,
            written: BTreeMap::new(),
            unwritten: BTreeMap::new(),
            writer: RouterWriter::new(&client),
        };
        let changes = watches(&client, &outages);
        conversion::run(conversion, "what becomes of EgressRouters", changes, (cluster, leadership), stop).await;
    }
}

struct RouterConversion {
    view: RouterView,
    image: String,
    /// What this leader has written, by the UID and the configuration.
    written: BTreeMap<ServiceKey, (String, String)>,
    /// Routers whose objects could not be written.
    unwritten: BTreeMap<ServiceKey, Unwritten>,
    writer: RouterWriter,
}

/// Why the objects of a router could not be written.
struct Unwritten {
    reason: &'static str,
    message: String,
    /// The version of the EgressRouter that was refused, for which it is not tried again: else many that the API server refuses would
    /// keep it and this task busy. `None` if it may go well in a moment.
    refused: Option<String>,
}

impl Conversion for RouterConversion {
    type Change = RouterChange;

    fn apply(&mut self, change: RouterChange) -> bool {
        self.view.apply(change)
    }

    fn has_assignment(&self, _: &str) -> bool {
        false
    }

    fn is_whole(&self) -> bool {
        self.view.is_whole()
    }

    fn forget_reported(&mut self) {
        self.written.clear();
        self.unwritten.clear();
    }

    async fn pass(&mut self, _: &KnownCluster, leadership: &Leadership) -> Vec<WriteError> {
        let mut errors = Vec::new();
        self.unwritten.retain(|key, _| self.view.routers.contains_key(key));
        self.written.retain(|key, _| self.view.routers.contains_key(key));
        let desired: BTreeMap<&ServiceKey, Result<RouterObjects, String>> =
            self.view.routers.iter().map(|(key, stored)| (key, RouterObjects::of(key, stored, &self.image))).collect();
        let valid = desired.iter().filter_map(|(key, desired)| Some((*key, desired.as_ref().ok()?)));
        let to_write = valid.filter(|(key, desired)| {
            let owner = self.view.deployments.get(key).and_then(|deployment| deployment.owner.as_ref());
            let is_written = owner == Some(&desired.uid) && self.written.get(key) == Some(&desired.written());
            let refused = self.unwritten.get(key).and_then(|unwritten| unwritten.refused.as_ref());
            !is_written && refused != Some(&desired.version)
        });
        let writes = to_write.map(|(key, desired)| {
            let writer = &self.writer;
            async move { (key.clone(), desired, desired.write(writer, key, leadership).await) }
        });
        for (key, desired, outcome) in all(writes.collect()).await {
            match outcome {
                Ok(None) => {
                    info!(namespace = key.namespace, router = key.name, "objects of an EgressRouter written");
                    self.unwritten.remove(&key);
                    self.written.insert(key, desired.written());
                }
                Ok(Some(kind)) => {
                    let message = format!("there is a {kind} of this name that is not of this EgressRouter");
                    let refused = Some(desired.version.clone());
                    self.unwritten.insert(key, Unwritten { reason: "NameTaken", message, refused });
                }
                Err(error) => {
                    let is_refused = (400..500).contains(&error.code()) && ![409, 429].contains(&error.code());
                    let refused = is_refused.then(|| desired.version.clone());
                    self.unwritten
                        .insert(key, Unwritten { reason: "WriteFailed", message: error.to_string(), refused });
                    errors.extend((!is_refused).then_some(error));
                }
            }
        }
        let statuses = desired.iter().filter_map(|(key, desired)| {
            let stored = self.view.routers.get(key)?;
            let conditions = conditions(desired, self.unwritten.get(key), self.view.deployments.get(key));
            let status = status_value(&conditions, &stored.status);
            (stored.status["conditions"] != status["conditions"]).then(|| {
                let (writer, key) = (&self.writer, (*key).clone());
                async move { timed(leadership, writer.set_status(&key, &status)).await }
            })
        });
        errors.extend(all(statuses.collect()).await.into_iter().filter_map(Result::err));
        errors
    }
}

/// The objects of a router.
struct RouterObjects {
    uid: String,
    /// Of the EgressRouter.
    version: String,
    /// As the pods' annotation has it.
    configuration: String,
    objects: Vec<DynamicObject>,
    has_service: bool,
}

impl RouterObjects {
    fn of(key: &ServiceKey, stored: &StoredRouter, image: &str) -> Result<Self, String> {
        if !is_label(&key.name) {
            let name = &key.name;
            return Err(format!(
                "metadata.name: a Service cannot be named {name}: a letter, then letters, digits and -, at most 63"
            ));
        }
        let router = of_egress_router(&key.namespace, &key.name, stored.spec.as_ref().map_err(Clone::clone)?)?;
        let objects = router.objects(image).map_err(|error| error.to_string())?;
        let configuration = Value::Object(router.config()).to_string();
        let mut own = Vec::new();
        for mut object in objects {
            own_object(&mut object, &router, &stored.uid);
            if object["kind"] == "Deployment" {
                // A changed configuration needs a new pod.
                object["spec"]["template"]["metadata"]["annotations"][CONFIGURATION] = json!(configuration);
            }
            own.push(serde_json::from_value::<DynamicObject>(object).map_err(|error| error.to_string())?);
        }
        let kind = |object: &DynamicObject| object.types.as_ref().map(|types| types.kind.clone());
        let has_service = own.iter().any(|object| kind(object).as_deref() == Some("Service"));
        // The Deployment says that all are there.
        own.sort_by_key(|object| kind(object).as_deref() == Some("Deployment"));
        Ok(Self { uid: stored.uid.clone(), version: stored.version.clone(), configuration, objects: own, has_service })
    }

    fn written(&self) -> (String, String) {
        (self.uid.clone(), self.configuration.clone())
    }

    /// Writes all of them. Returns what is another one's.
    async fn write(
        &self,
        writer: &RouterWriter,
        key: &ServiceKey,
        leadership: &Leadership,
    ) -> Result<Option<String>, WriteError> {
        for object in &self.objects {
            if timed(leadership, writer.write(object, &self.uid)).await? == RouterWritten::Taken {
                let kind = object.types.as_ref().map_or("object", |types| types.kind.as_str());
                return Ok(Some(kind.to_owned()));
            }
        }
        if !self.has_service {
            timed(leadership, writer.remove_service(key, &self.uid)).await?;
        }
        Ok(None)
    }
}

/// A label of RFC 1035, as Services are named; letters are lower-case ones.
fn is_label(name: &str) -> bool {
    let is_inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= 63
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && !name.ends_with('-')
        && name.chars().all(is_inside)
}

/// The garbage collector removes it with the EgressRouter.
fn own_object(object: &mut Value, router: &NamedRouter, uid: &str) {
    object["metadata"]["labels"][OF_ROUTER] = json!(router.name);
    object["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "network.operator.openshift.io/v1", "kind": "EgressRouter", "name": router.name, "uid": uid,
        "controller": true,
    }]);
}

/// What the status says.
fn conditions(
    desired: &Result<RouterObjects, String>,
    unwritten: Option<&Unwritten>,
    deployment: Option<&RouterDeployment>,
) -> Vec<DesiredCondition> {
    let own = desired.as_ref().ok().map(|desired| desired.uid.as_str());
    let deployment = deployment.filter(|deployment| own.is_none() || deployment.owner.as_deref() == own);
    let is_available = deployment.is_some_and(|deployment| deployment.is_available);
    let failure = match (desired, unwritten, deployment) {
        (Err(why), ..) => Some(("InvalidSpec", why.clone())),
        (_, Some(Unwritten { reason, message, refused }), _) => {
            let again = if refused.is_some() { "; it is tried again when this object changes" } else { "" };
            Some((*reason, format!("{message}{again}")))
        }
        (.., Some(RouterDeployment { failure: Some(why), .. })) => Some(("DeploymentFailed", why.clone())),
        _ => None,
    };
    let waiting = ("Waiting", "the router's pod is not available yet; its events say why".to_owned());
    let condition =
        |kind, status, (reason, message): (&'static str, String)| DesiredCondition { kind, status, reason, message };
    let as_expected = || ("AsExpected", String::new());
    let available = if is_available { as_expected() } else { failure.clone().unwrap_or_else(|| waiting.clone()) };
    let progressing = match (&failure, is_available) {
        (None, false) => (true, waiting),
        _ => (false, as_expected()),
    };
    let (is_degraded, degraded) = failure.map_or((false, as_expected()), |failure| (true, failure));
    vec![
        condition("Available", is_available, available),
        condition("Progressing", progressing.0, progressing.1),
        condition("Degraded", is_degraded, degraded),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(spec: Value) -> StoredRouter {
        let spec = serde_json::from_value(spec).map_err(|error: serde_json::Error| error.to_string());
        StoredRouter { uid: "u1".to_owned(), version: "7".to_owned(), spec, status: Value::Null }
    }

    fn valid() -> Value {
        json!({
            "mode": "Redirect", "addresses": [{"ip": "192.168.12.99/24", "gateway": "192.168.12.1"}],
            "redirect": {"redirectRules": [{"destinationIP": "203.0.113.25", "port": 80, "protocol": "TCP"}]},
        })
    }

    fn key() -> ServiceKey {
        ServiceKey { namespace: "shop".to_owned(), name: "web".to_owned() }
    }

    fn said(conditions: &[DesiredCondition]) -> Vec<(&str, bool, &str)> {
        conditions.iter().map(|one| (one.kind, one.status, one.reason)).collect()
    }

    #[test]
    fn objects_are_owned_and_the_deployment_is_the_last_one() {
        let desired = RouterObjects::of(&key(), &stored(valid()), "image:1").expect("valid");
        let kinds: Vec<String> =
            desired.objects.iter().map(|object| object.types.clone().expect("a kind").kind).collect();
        assert_eq!(kinds, ["NetworkAttachmentDefinition", "Service", "Deployment"]);
        for object in &desired.objects {
            let owners = object.metadata.owner_references.clone().expect("an owner");
            assert_eq!((owners[0].uid.as_str(), owners[0].controller), ("u1", Some(true)));
            assert_eq!(object.metadata.labels.as_ref().expect("labels")[OF_ROUTER], "web");
        }
        let template = &desired.objects[2].data["spec"]["template"];
        assert_eq!(template["metadata"]["annotations"][CONFIGURATION], desired.configuration);
    }

    #[test]
    fn conditions_say_what_has_become_of_a_router() {
        let desired = |spec| RouterObjects::of(&key(), &stored(spec), "image:1");
        let running =
            RouterDeployment { owner: Some("u1".to_owned()), is_available: true, ..RouterDeployment::default() };
        let failed = RouterDeployment { is_available: false, failure: Some("quota".to_owned()), ..running.clone() };
        let of_another = RouterDeployment { owner: None, ..running.clone() };
        let waits =
            [("Available", false, "Waiting"), ("Progressing", true, "Waiting"), ("Degraded", false, "AsExpected")];
        assert_eq!(said(&conditions(&desired(valid()), None, None)), waits);
        assert_eq!(said(&conditions(&desired(valid()), None, Some(&of_another))), waits);
        let runs = [
            ("Available", true, "AsExpected"),
            ("Progressing", false, "AsExpected"),
            ("Degraded", false, "AsExpected"),
        ];
        assert_eq!(said(&conditions(&desired(valid()), None, Some(&running))), runs);
        let mut invalid = valid();
        invalid["addresses"][0]["gateway"] = json!("10.0.0.300");
        let degraded = conditions(&desired(invalid), None, None);
        let reasons = [
            ("Available", false, "InvalidSpec"),
            ("Progressing", false, "AsExpected"),
            ("Degraded", true, "InvalidSpec"),
        ];
        assert_eq!(said(&degraded), reasons);
        assert!(degraded[2].message.contains("10.0.0.300"), "{}", degraded[2].message);
        let refused = Unwritten { reason: "NameTaken", message: String::new(), refused: Some("7".to_owned()) };
        let taken = conditions(&desired(valid()), Some(&refused), Some(&running));
        assert_eq!(said(&taken)[2], ("Degraded", true, "NameTaken"));
        let failing = conditions(&desired(valid()), None, Some(&failed));
        assert_eq!(said(&failing)[2], ("Degraded", true, "DeploymentFailed"));
        for name in ["web.shop", "7web", "web-", &"w".repeat(64)] {
            let key = ServiceKey { name: name.to_owned(), ..key() };
            assert!(RouterObjects::of(&key, &stored(valid()), "image:1").is_err(), "{name}");
        }
    }
}
