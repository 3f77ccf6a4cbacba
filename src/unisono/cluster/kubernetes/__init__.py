"""Kubernetes: `job.py` describes and checks a run, `pod.py` writes its pods, `manifests.py` JobSets and TrainJobs."""
